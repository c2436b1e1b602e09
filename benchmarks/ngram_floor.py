"""Perplexity of counts of three neighbouring tokens on the captions: the floor that ``smollm2`` is held to.

Interpolated Kneser-Ney: the probability of a token after two others, after one, and alone, each less a discount that
goes to the next shorter context, and in the end to all tokens of the vocabulary alike. The discount of each order is
Ney's n1 / (n1 + 2 n2), of what was seen once and twice. Nothing is tuned; tokens, texts and the targets that are scored
are those of the configuration, which also says how many texts one run sees.

    python benchmarks/ngram_floor.py --set model.pretrained=MODEL --set data.path=FOLDER --samples 1280
    python benchmarks/ngram_floor.py --set model.pretrained=MODEL --set data.path=FOLDER           all texts
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from client_pipeline.partition.parts import IGNORED_LABEL
from client_pipeline.runtime.control_unit.data_order import DataOrder
from flower_app.config.sources import load_config
from flower_app.tasks.base import task
from flower_app.tasks.causal_lm import CausalLMTask
from flower_app.tasks.plain_text import load_text
from flower_app.tasks.tokenizer import TextTokenizer

ORDER = 3
Gram = tuple[int, ...]


def with_begin(ids: Sequence[int]) -> list[int]:
    """Repeat the begin mark, so that the first token has as many before it as any other."""
    return [ids[0]] * (ORDER - 2) + list(ids)


class KneserNey:
    """Probability of a token after those before it.

    Parameters
    ----------
    texts : token ids to count in
    vocabulary : tokens that there are; one that was never seen has a share, too
    """

    def __init__(self, texts: Iterable[Sequence[int]], vocabulary: int) -> None:
        self._vocabulary = vocabulary
        counts: list[Counter[Gram]] = [Counter() for _ in range(ORDER)]
        for ids in texts:
            padded = with_begin(ids)
            counts[-1].update(tuple(padded[end - ORDER : end]) for end in range(ORDER, len(padded) + 1))
        # A shorter context counts what a token follows there, not how often: "Francisco" is frequent after one word.
        for longer, shorter in zip(counts[:0:-1], counts[-2::-1], strict=True):
            shorter.update(gram[1:] for gram in longer)
        self._orders = []
        for grams in counts:
            seen = Counter(grams.values())
            discount = seen[1] / (seen[1] + 2 * seen[2]) if seen[1] else 0.5
            totals: Counter[Gram] = Counter()
            kinds: Counter[Gram] = Counter()
            for gram, count in grams.items():
                totals[gram[:-1]] += count
                kinds[gram[:-1]] += 1
            self._orders.append((grams, totals, kinds, discount))

    def probability(self, before: Sequence[int], token: int) -> float:
        """Probability of ``token`` after the two tokens ``before``."""
        found = 1 / self._vocabulary
        for length, (grams, totals, kinds, discount) in enumerate(self._orders):
            context = tuple(before[len(before) - length :])
            if not totals[context]:
                break
            own = max(grams[(*context, token)] - discount, 0.0)
            found = (own + discount * kinds[context] * found) / totals[context]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--samples", type=int, default=0, help="training texts, in the order of one process; 0: all")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.sets)
    chosen = task(config.task)
    if not isinstance(chosen, CausalLMTask):
        parser.error(f"--config {arguments.config}: a configuration of the task causal-lm is needed")
    prepared = chosen.prepare(config.data, config.model, config.seed, num_clusters=1)
    data = chosen.cluster_data(config.data, prepared.tokenizer_json, 0, 1, config.seed)
    order = DataOrder(len(data), 1, config.seed, cluster=0)
    count = arguments.samples or len(data)
    texts = [data.collate(order.next_batch())["input_ids"][0].tolist() for _ in range(count)]
    model = KneserNey(texts, prepared.spec.config["vocab_size"])
    logs: list[float] = []
    tokenizer = TextTokenizer.from_json(prepared.tokenizer_json)
    unseen = chosen.encode(load_text(config.data, "test", config.seed), tokenizer, config.data.max_length)
    for i in range(len(unseen)):
        batch = unseen.collate([i])
        padded = with_begin(batch["input_ids"][0].tolist())
        for place, label in enumerate(batch["labels"][0].tolist(), start=ORDER - 2):
            if label != IGNORED_LABEL:
                logs.append(math.log(model.probability(padded[place - ORDER + 1 : place], padded[place])))
    loss = -sum(logs) / len(logs)
    row = {
        "how": "Kneser-Ney trigrams",
        "samples": count,
        "loss": loss,
        "perplexity": math.exp(loss),
        "tokens": len(logs),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
