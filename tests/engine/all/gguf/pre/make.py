#!/usr/bin/env python3
"""Texts in many scripts, a byte-level BPE, and what llama.cpp's splits make of both: texts.txt, merges.txt and ids.txt.

    python3 make.py LLAMA_CPP BUILD

LLAMA_CPP is a source folder, BUILD one in which libllama was built as a static library. Needs PyPI's `gguf` and `tokenizers`.
ids.txt has, for each split, a checksum of the ids of every 100 texts, without those that different.txt names. There llama.cpp's rules
stand for those of the models: its tekken and gpt-4o know upper and lower case of ASCII letters only, and leave marks out of words.
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile

import gguf
import tokenizers

HERE = pathlib.Path(__file__).parent
PRES = ["llama-bpe", "dbrx", "qwen2", "qwen35", "tekken", "gpt-4o", "gpt-2", "starcoder"]

# First and last letters of scripts; marks among them stay with what they follow.
SCRIPTS = [
    (0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x531, 0x587), (0x5D0, 0x5EA), (0x620, 0x64A),
    (0x904, 0x94D), (0x985, 0x9CD), (0xB85, 0xBCD), (0xE01, 0xE4E), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1E00, 0x1EFF),
    (0x3041, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x300, 0x33F),
]
DIGITS = ["0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "²³¼½Ⅳ①"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n", "\n ", "\u00a0", "\u3000", "\u2009", "\u2028", "\x0b", "\x85"]
MARKS = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡¿«»„“”‘’…–—·、。，！？€№§©→∑≤") + ["...", "//", "/*", "*/", "==", "->", "::", "/\n", ")\n"]
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'RE", "'Ve", "'LL", "'x", "’s"]
PICTURES = ["🎉", "👩‍👩‍👧", "🇩🇪", "👍🏽", "☃", "☃️", "𝔘", "𐍈", "\u200d", "\ufeff", "\u200b", "\u00ad"]
WORDS = "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you were all".split()


def text(rng):
    out = []
    for _ in range(rng.randint(1, 14)):
        kind = rng.random()
        if kind < 0.35:
            first, last = rng.choice(SCRIPTS)
            word = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))
            out.append(rng.choice([word, word.capitalize(), word.upper(), word + "\u0301"]))
        elif kind < 0.5:
            out.append(rng.choice(WORDS) if rng.random() < 0.7 else rng.choice(WORDS).capitalize())
        elif kind < 0.6:
            out.append("".join(rng.choice(rng.choice(DIGITS)) for _ in range(rng.randint(1, 9))))
        elif kind < 0.72:
            out.append(rng.choice(MARKS) * rng.choice([1, 1, 1, 2, 5]))
        elif kind < 0.78:
            out.append(rng.choice(CONTRACTIONS))
        elif kind < 0.82:
            out.append(rng.choice(PICTURES))
        else:
            out.append(rng.choice(SPACES) * rng.choice([1, 1, 1, 2, 3]))
        if rng.random() < 0.4:
            out.append(" ")
    return "".join(out).encode("utf-8", "ignore").decode()


def hundreds(hashes, different):
    """One checksum for every 100: each is added after the sum so far was rotated by a bit."""
    for first in range(0, len(hashes), 100):
        sum = 0
        for i in range(first, first + 100):
            if i not in different:
                sum = (sum << 1 & (1 << 64) - 1 | sum >> 63) ^ int(hashes[i], 16)
        yield f"{sum:016x}"


def main():
    source, build = map(pathlib.Path, sys.argv[1:3])
    rng = random.Random(7)
    texts = [text(rng) for _ in range(10000)]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    model = json.loads(bpe.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (HERE / "texts.txt").write_text("".join(json.dumps(t, ensure_ascii=False) + "\n" for t in texts))
    (HERE / "merges.txt").write_text("".join(m + "\n" for m in merges))
    # Ids: the alphabet in the order of its characters, then a token for each merge.
    tokens = alphabet + [m.replace(" ", "") for m in merges]
    lines = [line.split() for line in (HERE / "different.txt").read_text().splitlines()]
    different, ids = {pre: set(map(int, numbers)) for pre, *numbers in lines}, []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        libraries = [build / "src/libllama.a", *(build / f"ggml/src/lib{n}.a" for n in ["ggml", "ggml-cpu", "ggml-base"])]
        include = [f"-I{source / d}" for d in ["include", "ggml/include"]]
        program = folder / "ids"
        subprocess.run(["g++", "-O1", "-o", program, HERE / "ids.cpp", *include, *libraries, "-fopenmp", "-lpthread", "-ldl"], check=True)
        (folder / "texts").write_bytes(b"".join(len(t.encode()).to_bytes(4, "little") + t.encode() for t in texts))
        for pre in PRES:
            out = gguf.GGUFWriter(folder / "vocab.gguf", "llama")
            for add in ["context_length", "embedding_length", "feed_forward_length", "head_count", "block_count"]:
                getattr(out, f"add_{add}")(64)
            out.add_layer_norm_rms_eps(1e-5)
            out.add_tokenizer_model("gpt2")
            out.add_tokenizer_pre(pre)
            out.add_token_list(tokens)
            out.add_token_types([1] * len(tokens))
            out.add_token_merges(merges)
            out.add_add_bos_token(False)
            out.write_header_to_file()
            out.write_kv_data_to_file()
            out.close()
            run = subprocess.run([program, folder / "vocab.gguf", folder / "texts"], check=True, capture_output=True, text=True)
            ids.append(" ".join([pre, *hundreds(run.stdout.split(), different.get(pre, set()))]))
    (HERE / "ids.txt").write_text("\n".join(ids) + "\n")


main()
