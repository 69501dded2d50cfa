"""The tensors of a Llama, by name; nothing here needs torch."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]


def llama_shapes(*, layers: int, width: int, inner: int, kv: int, words: int) -> Shapes:
    """Names and shapes in the order of the files: `width` is the hidden size, `inner` the MLP's, `kv` that of
    all key heads, `words` the vocabulary's."""
    shapes: Shapes = {"model.embed_tokens.weight": (words, width)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (width, width),
            at + "self_attn.k_proj.weight": (kv, width),
            at + "self_attn.v_proj.weight": (kv, width),
            at + "self_attn.o_proj.weight": (width, width),
            at + "mlp.gate_proj.weight": (inner, width),
            at + "mlp.up_proj.weight": (inner, width),
            at + "mlp.down_proj.weight": (width, inner),
            at + "input_layernorm.weight": (width,),
            at + "post_attention_layernorm.weight": (width,),
        }
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (words, width)}
