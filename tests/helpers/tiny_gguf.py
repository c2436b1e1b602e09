"""A LLaMA of two blocks in a GGUF file, tokenizer included, made here."""

import numpy as np

WIDTH, FEED_FORWARD, BLOCKS = 16, 32, 2
TOKENS = ["<|pad|>", "<|begin|>", "<|end|>", *map(chr, range(33, 127)), "Ġ", "he", "the"]

TEMPLATE = (
    "{% for m in messages %}{{ '<|begin|>' + m.role + ':' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant:' }}{% endif %}"
)


def write_tiny_gguf(file):
    """Write the file; returns its float32 tensors by GGUF's names."""
    import gguf

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["h e", "t he"])
    # The first three are control tokens.
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,), "output": (len(TOKENS), WIDTH)}
    for index in range(BLOCKS):
        block = dict(attn_norm=(WIDTH,), ffn_norm=(WIDTH,), attn_q=(WIDTH, WIDTH), attn_output=(WIDTH, WIDTH))
        block |= dict(attn_k=(WIDTH // 2, WIDTH), attn_v=(WIDTH // 2, WIDTH))
        block |= dict(ffn_gate=(FEED_FORWARD, WIDTH), ffn_up=(FEED_FORWARD, WIDTH), ffn_down=(WIDTH, FEED_FORWARD))
        shapes |= {f"blk.{index}.{name}": shape for name, shape in block.items()}
    generator = np.random.default_rng(0)
    tensors = {f"{name}.weight": generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
