"""An exported language model in plain transformers: its loss on a file of texts, and what it writes.

Nothing of this project runs here. A text is scored token by token between a begin mark and an end mark, cut to
``--max-length``, as the task ``causal-lm`` scores it, so that the loss can be held against a run's ``summary.json``.

    collapipe export latest tuned
    python benchmarks/exported_model.py tuned --texts FOLDER/test_2016_flickr.en --prompts "A man in a blue shirt"
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the exported model")
    parser.add_argument(
        "--prompts", nargs="*", default=[], help="beginnings that it continues, by the likeliest token each time"
    )
    parser.add_argument("--texts", type=Path, required=True, help="a text a line")
    parser.add_argument("--mark", help="token that begins and ends a text; by default the tokenizer's own two")
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=24)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
    begin, end, room = tokenizer.bos_token_id, tokenizer.eos_token_id, arguments.max_length - 2
    if arguments.mark:
        begin = end = tokenizer.convert_tokens_to_ids(arguments.mark)
    sequences = []
    for line in arguments.texts.read_text(encoding="utf-8").splitlines():
        ids = tokenizer(line.strip(), add_special_tokens=False)["input_ids"]
        sequences += [[begin, *ids[start : start + room], end] for start in range(0, len(ids), room)]
    sequences.sort(key=len)
    loss_sum, targets = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(sequences), BATCH):
            batch = sequences[start : start + BATCH]
            longest = max(map(len, batch))
            ids_BT = torch.tensor([ids + [end] * (longest - len(ids)) for ids in batch])
            mask_BT = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in batch])
            scores_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, :-1]
            labels_BT = ids_BT[:, 1:].masked_fill(mask_BT[:, 1:] == 0, -100)
            losses = torch.nn.functional.cross_entropy(scores_BTV.flatten(0, 1), labels_BT.flatten(), reduction="none")
            loss_sum += float(losses.double().sum())
            targets += int(mask_BT[:, 1:].sum())
        answers = {}
        for prompt in arguments.prompts:
            ids_BT = torch.tensor([[begin, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]])
            written = model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                do_sample=False,
                max_new_tokens=arguments.new_tokens,
                eos_token_id=end,
                pad_token_id=end,
            )
            answers[prompt] = tokenizer.decode(written[0, ids_BT.shape[1] :], skip_special_tokens=True)
    loss = loss_sum / targets
    print(json.dumps({"tokens": targets, "loss": loss, "perplexity": math.exp(loss), "answers": answers}))


if __name__ == "__main__":
    main()
