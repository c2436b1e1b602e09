"""Decoder-only models of the transformers library: the first layers are the TEBs, the last are the server's.

One cut serves all of them. The library's base model says what stands before its layers and behind them
(``base_model_pp_plan``, or the order of its children), its loop gives each layer its arguments, and its language model
turns the last states into scores, by whatever factors and caps it has. A classifier scores the last real token's state,
or every token's. ``server_layers`` in the specification says how
many layers the server has besides closing norm and output layer. With ``cluster_tail`` it has these layers alone: norm
and output layer are the embedding's ``tail``, and the head reads them there. The TEBs take a
:class:`~client_pipeline.partition.token_slices.TokenSlice` in the place of the mask, too.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from client_pipeline.families.encoder import ClassifierHead
from client_pipeline.families.hugging_face import CLUSTER_TAIL, SERVER_LAYERS, LibraryFamily, has_head
from client_pipeline.families.layer_arguments import BodyNames, LayerArguments, body_names
from client_pipeline.families.vocabulary_loss import vocabulary_loss
from client_pipeline.partition.packed_mask import is_plain, library_mask
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, MaskForm, ModelParts
from client_pipeline.partition.spec import CAUSAL_LM, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, ModelSpec

_TOKEN_DROPOUT = 0.1
"""Rate right before the library's classifier of tokens where its configuration names none."""


class Causal(LibraryFamily):
    """Decoder-only language models, and classifiers on them."""

    HEADS = (CAUSAL_LM, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION)
    attention = None

    def library_config(self, spec: ModelSpec) -> Any:
        """Build the library's configuration of a causal model.

        Raises
        ------
        ValueError
            If the head is another one, no block would be left for the devices, or the loss of routers is asked for.
        """
        config = super().library_config(spec)
        if reason := _reason_to_refuse(config):
            raise CannotSplit(spec.family, reason)
        if not has_head(spec.head, config):
            raise ValueError(
                f"model type {spec.family!r} has no head {spec.head} in the transformers library; expected one that "
                f"has it, such as llama or qwen3, or the head {CAUSAL_LM}"
            )
        if spec.head == TOKEN_CLASSIFICATION and getattr(config, "classifier_dropout", None) is None:
            # The library's own choice, in words: what a model drops is read from its configuration.
            rate = getattr(config, "hidden_dropout", None)
            config.classifier_dropout = _TOKEN_DROPOUT if rate is None else rate
        server = spec.config.get(SERVER_LAYERS, 0)
        if not isinstance(server, int) or not 0 <= server < config.num_hidden_layers:
            raise ValueError(
                f"model.server-layers: expected 0 to {config.num_hidden_layers - 1}, as the model has "
                f"{config.num_hidden_layers} blocks, found {server!r}"
            )
        if getattr(config, "output_router_logits", False):
            raise ValueError(
                f"{spec.family}: output_router_logits: expected false, found {config.output_router_logits}: the loss "
                "of routers needs all layers in one place; set it to false in config.json, and train without that loss"
            )
        return config

    def tied(self, spec: ModelSpec) -> dict[str, str]:
        """Return the output layer, where the model ties it."""
        return self.unfilled_parts(spec).tied

    def num_blocks(self, spec: ModelSpec) -> int:
        """Return L, the number of blocks that are not the server's."""
        return super().num_blocks(spec) - int(spec.config.get(SERVER_LAYERS, 0))

    def mask_form(self, mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
        """Return the mask; None where each row is one example. What attention takes is made of it once a stage."""
        del dtype
        return None if is_plain(mask_BT) else mask_BT

    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split a ``...ForCausalLM``; the parts share its parameters."""
        body = _base_model(model)
        try:
            names = body_names(body, model.config.num_hidden_layers)
            _carry_all_values(body)
            arguments = LayerArguments(body, names)
        except ValueError as error:
            raise CannotSplit(spec.family, str(error)) from error
        embedding = CausalEmbedding(body, names, arguments)
        blocks = [CausalBlock(layer, arguments, i) for i, layer in enumerate(getattr(body, names.layers))]
        place = self.num_blocks(spec)
        norm = getattr(body, names.norm) if names.norm else nn.Identity()
        server_blocks = nn.ModuleList(blocks[place:])
        if spec.head != CAUSAL_LM:
            if spec.head == SEQUENCE_CLASSIFICATION:
                embedding = LastTokenEmbedding(body, names, arguments)
            dropout, classifier = getattr(model, "dropout", None), _classifier(model)
            head: nn.Module = CausalClassifier(spec, server_blocks, norm, dropout, classifier)
            return self.joined(model, spec, embedding, blocks[:place], head)
        matrix, output = model.get_input_embeddings().weight, model.get_output_embeddings()
        for name, child in model.named_children():
            if child not in (model.base_model, body, output) and next(child.parameters(), None) is not None:
                raise CannotSplit(spec.family, f"it has layers between closing norm and output layer ({name})")
        shared = [name for name, parameter in embedding.named_parameters() if parameter is matrix]
        tied = {"lm_head.weight": shared[0]} if output.weight is matrix else {}
        if spec.config.get(CLUSTER_TAIL):
            embedding.tail = CausalTail(model, body, norm)
            names_there = {parameter: name for name, parameter in embedding.named_parameters()}
            tied = {name: names_there[parameter] for name, parameter in embedding.tail.named_parameters()}
        head = CausalHead(model, body, server_blocks, norm, tied)
        return self.joined(model, spec, embedding, blocks[:place], head)


class CannotSplit(ValueError):
    """A model type that this cut does not fit; ``reason`` says why, without the type's name."""

    def __init__(self, family: str, reason: str) -> None:
        super().__init__(f"model type {family!r} cannot be split: {reason}")
        self.reason = reason


def _reason_to_refuse(config: Any) -> str:
    """Return why a kind of model cannot be cut, where its configuration says so; empty: it may be tried."""
    if not hasattr(config, "num_hidden_layers"):
        return "it has no one number of layers"
    if config.is_encoder_decoder:
        return "it is the decoder of an encoder-decoder model"
    if config.model_type in ("zamba", "zamba2"):
        return "its layers share one attention block"
    if getattr(config, "layerdrop", 0):
        return f"it skips whole layers at random, found layerdrop = {config.layerdrop}; set it to 0"
    if getattr(config, "n_recurrent_layers", 0):
        return "some of its layers run again and again (n_recurrent_layers)"
    if getattr(config, "num_kv_shared_layers", 0):
        return "layers share keys and values with earlier layers (num_kv_shared_layers)"
    if getattr(config, "hidden_size_per_layer_input", 0):
        return "its embedding is met again in every layer (hidden_size_per_layer_input)"
    return ""


def _base_model(model: Any) -> Any:
    """Return what holds the layers: some base models wrap their decoder, and some output layers are called one."""
    decoder, num_layers = model.get_decoder(), model.config.num_hidden_layers
    for body in (decoder, model.base_model, *model.children()):
        if any(isinstance(child, nn.ModuleList) and len(child) == num_layers for child in body.children()):
            return body
    return decoder


class CarriedValue(nn.Parameter):
    """A value that a model's files have and its training leaves alone, such as a bias that balances experts.

    Parts hold and send nothing but parameters. As one without a gradient it travels, and nothing changes it.
    """


def _carry_all_values(body: nn.Module) -> None:
    """Make parameters of all other values that a model's files have, in place."""
    for name, value in body.state_dict(keep_vars=True).items():
        if value.is_floating_point() and not value.requires_grad:
            path, _, leaf = name.rpartition(".")
            setattr(body.get_submodule(path), leaf, CarriedValue(value.detach()))


class CausalEmbedding(nn.Module):
    """All that a model does before its first layer."""

    def __init__(self, body: nn.Module, names: BodyNames, arguments: LayerArguments) -> None:
        super().__init__()
        for name in names.before:
            setattr(self, name, getattr(body, name))
        # In a list: its modules are this one's own already.
        self._loop = [arguments.embedding(dict(self.named_children()))]
        self._arguments = [arguments]

    def forward(self, batch: Batch) -> Tensor:
        """Embed ``batch["input_ids"]``, [B, T, D]."""
        # Some models drop in the loop itself.
        loop = self._loop[0].train(self.training)
        states = loop(input_ids=batch["input_ids"], use_cache=False, **library_mask(batch.get("attention_mask")))
        return cast(Tensor, states[0])

    def step(self, ids_RT: Tensor, mask_RK: Tensor) -> Tensor:
        """Embed new tokens behind earlier ones, [R, T, D]; the mask is True at real tokens of both."""
        return self._arguments[0].embed_step(self._loop[0].train(self.training), ids_RT, mask_RK)


class LastTokenEmbedding(CausalEmbedding):
    """The same for a classifier of sequences, with the library's padding: it finds a text's last token by its id."""

    def __init__(self, body: nn.Module, names: BodyNames, arguments: LayerArguments) -> None:
        super().__init__(body, names, arguments)
        self.pad_id = cast(Any, body.config).pad_token_id

    def forward(self, batch: Batch) -> Tensor:
        """Embed ``batch["input_ids"]``, [B, T, D].

        Raises
        ------
        ValueError
            If the library would score another token than the last real one.
        """
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids, dtype=torch.bool))
        if self.pad_id is None and len(ids) > 1:
            raise ValueError(
                "pad_token_id: expected the id of the padding, by which the library's classifier finds a text's last "
                "token, found none; set it in config.json"
            )
        if self.pad_id is not None and bool((last_places(ids != self.pad_id) != last_places(mask)).any()):
            raise ValueError(
                f"input_ids: expected padding, and no text's last token, to be pad_token_id = {self.pad_id}, as the "
                "library's classifier scores each text's last other token; give padding a token of its own"
            )
        return super().forward(batch)


def last_places(mask_BT: Tensor) -> Tensor:
    """Return the place of each row's last true element, [B]; 0 where there is none."""
    return (mask_BT * torch.arange(mask_BT.shape[1], device=mask_BT.device)).argmax(dim=1)


class CausalBlock(nn.Module):
    """One layer of the library's model.

    Parameters
    ----------
    layer : as the library has it
    arguments : what the model gives its layers
    index : the layer's, in the whole model
    """

    def __init__(self, layer: nn.Module, arguments: LayerArguments, index: int) -> None:
        super().__init__()
        self.layer = layer
        self.arguments = arguments
        self.index = index

    def forward(self, x_BTD: Tensor, mask: MaskForm) -> Tensor:
        """Apply the layer, [B, T, D]; of a slice to its tokens alone."""
        output = self.layer(x_BTD, **self.arguments.of_layer(self.index, x_BTD, mask))
        return cast(Tensor, output[0] if isinstance(output, tuple | list) else output)

    def step(self, x_RTD: Tensor, mask_RK: Tensor, keys: Any) -> Tensor:
        """Apply the layer to new tokens, [R, T, D], whose keys and values go behind the earlier ones in ``keys``."""
        output = self.layer(x_RTD, **self.arguments.of_step(self.index, x_RTD, mask_RK, keys))
        return cast(Tensor, output[0] if isinstance(output, tuple | list) else output)


class CausalTail(nn.Module):
    """The closing norm and the output layer.

    Parameters
    ----------
    model : the library's, which says what becomes of the last states
    body : its base model
    norm : closes the last block
    blocks : come before it where one part has all
    """

    def __init__(self, model: Any, body: nn.Module, norm: nn.Module, blocks: nn.ModuleList | None = None) -> None:
        super().__init__()
        if blocks is not None:
            self.blocks = blocks
        self.norm = norm
        self.lm_head = model.get_output_embeddings()
        self._scorer = [_Scorer(model, body, self.lm_head)]
        self._is_product = _is_product(model, body)

    def scores(self, states_BTD: Tensor) -> Tensor:
        """Scores over the vocabulary [B, T, V] of states after the closing norm: with the model's factors and caps."""
        return self._scorer[0].scores(states_BTD)

    def forward(self, x_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the cross-entropies of each label, given the last block's states of what came before it.

        Labels stand where their tokens do, as in the library, and are shifted here. Nothing comes before the first.
        """
        labels_BT = targets["labels"]
        if labels_BT.shape != mask_BT.shape:
            raise ValueError(f"labels: expected shape {list(mask_BT.shape)}, found {list(labels_BT.shape)}")
        if bool((labels_BT[:, 0] != IGNORED_LABEL).any()):
            raise ValueError(f"labels: expected {IGNORED_LABEL} at the first position, which has no loss and no weight")
        states_BTD = self.norm(x_BTD)[:, :-1]
        labels = labels_BT[:, 1:]
        # Only positions with a loss reach the output layer.
        real = labels != IGNORED_LABEL
        scores = None if self._is_product else self.scores
        return vocabulary_loss(states_BTD[real], self.lm_head, labels[real], scores)


class CausalHead(CausalTail):
    """The last blocks before it, too.

    Parameters
    ----------
    model, body, norm : as of the tail
    blocks : the server's
    tied : as in :func:`client_pipeline.partition.parts.tied_names`
    """

    def __init__(
        self, model: Any, body: nn.Module, blocks: nn.ModuleList, norm: nn.Module, tied: dict[str, str]
    ) -> None:
        super().__init__(model, body, norm, blocks)
        self.tied = tied

    def hidden(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """States after the closing norm, [B, T, D]."""
        return cast(Tensor, self.norm(_through(x_BTD, mask_BT, self.blocks)))

    def logits(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Scores over the vocabulary at every position, [B, T, V]."""
        return self.scores(self.hidden(x_BTD, mask_BT))

    def step(self, x_RTD: Tensor, mask_RK: Tensor, keys: Any, last: int = 1) -> Tensor:
        """Scores of the successors of the last ``last`` new tokens; the arguments are those of a block's step."""
        for block in self.blocks:
            x_RTD = cast(CausalBlock, block).step(x_RTD, mask_RK, keys)
        return self.scores(self.norm(x_RTD[:, -last:]))

    def forward(self, x_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the losses of :class:`CausalTail`, given the states before the head's own blocks."""
        return super().forward(_through(x_BTD, mask_BT, self.blocks), mask_BT, targets)

    def without_tail(self) -> CausalMiddle:
        """Return the blocks alone, with the same parameters under the same names."""
        return CausalMiddle(self.blocks)


class CausalMiddle(nn.Module):
    """The server's blocks where the tail is the control unit's."""

    returns_states = True

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """States after the blocks, [B, T, D]."""
        return _through(x_BTD, mask_BT, self.blocks)


class CausalClassifier(ClassifierHead):
    """The last blocks, the closing norm and a classifier, of the last real token or of every token."""

    def __init__(
        self, spec: ModelSpec, blocks: nn.ModuleList, norm: nn.Module, dropout: nn.Module | None, classifier: nn.Module
    ) -> None:
        super().__init__(spec, None, dropout, classifier)
        self.blocks = blocks
        self.norm = norm
        self.is_of_sequences = spec.head == SEQUENCE_CLASSIFICATION

    def logits(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Class scores: [B, classes] of sequences, [B, T, classes] of tokens."""
        states = cast(Tensor, self.norm(_through(hidden_BTD, mask_BT, self.blocks)))
        if self.is_of_sequences:
            states = states[torch.arange(len(states), device=states.device), last_places(mask_BT)]
        return super().logits(states, mask_BT)


def _through(x_BTD: Tensor, mask_BT: Tensor, blocks: nn.ModuleList) -> Tensor:
    """Return the states after the server's blocks, [B, T, D]."""
    mask = None if is_plain(mask_BT) else mask_BT
    for block in blocks:
        x_BTD = block(x_BTD, mask)
    return x_BTD


def _classifier(model: Any) -> nn.Module:
    """Return the one child of a library's classifier that is neither its base model nor drops anything."""
    children = dict(model.named_children())
    own = [
        name
        for name, child in children.items()
        if name != model.base_model_prefix and not isinstance(child, nn.Dropout)
    ]
    if len(own) != 1:
        raise ValueError(
            f"{type(model).__name__}: expected one classifier beside {model.base_model_prefix}, found "
            f"{', '.join(own) or 'none'}"
        )
    return cast(nn.Module, children[own[0]])


class _LastStates:
    """Output of a base model: its last states, and nothing of what else a kind of model may give."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, place: Any) -> Any:
        return self.last_hidden_state if place in (0, "last_hidden_state") else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _FixedStates(nn.Module):
    """A base model whose last states are there already.

    Parameters
    ----------
    model : the library's; its language model may read the factors that it has as attributes
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, value in vars(model).items():
            if isinstance(value, int | float):
                setattr(self, name, value)
        self.states: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _LastStates:
        """Return them as the library's base models do."""
        assert self.states is not None
        return _LastStates(self.states)


class _Scorer:
    """A library model without its base model: last states in, scores out.

    Parameters
    ----------
    model : the library's
    body : its base model
    output : takes the place of its output layer
    """

    def __init__(self, model: Any, body: nn.Module, output: nn.Module) -> None:
        self._body = _FixedStates(body)
        self._model = copy.deepcopy(model, {id(body): self._body, id(model.get_output_embeddings()): output})

    def scores(self, states_BTD: Tensor) -> Tensor:
        """Return scores over the vocabulary, [B, T, V]."""
        self._body.states = states_BTD
        try:
            return cast(Tensor, self._model(inputs_embeds=states_BTD, use_cache=False).logits)
        finally:
            self._body.states = None


class _KnownScores(nn.Module):
    """An output layer that gives known scores, and keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scores_V = torch.linspace(-90.0, 90.0, 7)
        # Some models look at its type.
        self.weight = self.scores_V
        self.input: Tensor | None = None

    def forward(self, states_BTD: Tensor) -> Tensor:
        """Return the known scores at every position."""
        self.input = states_BTD
        return self.scores_V.expand(*states_BTD.shape[:-1], -1)


def _is_product(model: Any, body: nn.Module) -> bool:
    """Return whether a model's scores are its output layer's alone: no factor before or behind it, and no cap."""
    known = _KnownScores()
    states = torch.linspace(-1.0, 1.0, int(model.config.hidden_size))[None, None]
    scores = _Scorer(model, body, known).scores(states)
    return known.input is not None and torch.equal(known.input, states) and torch.equal(scores[0, 0], known.scores_V)
