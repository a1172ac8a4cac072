#!/usr/bin/env python3
"""How long a prompt takes that one server computes and another one answers, on two CUDA devices of one host.

Writes a checkpoint of random weights of a Nemotron-H configuration (bf16), starts a server on each device, and prints for each length
medians of the milliseconds to the first token: of the first server alone, of both, and of both if the first one has the prompt in its
cache; then the rate of that last one, in GB/s of all that is sent.

usage: handover_speed.py --selkie PROGRAM --config CONFIG.json --dir FOLDER [--tokens N,N] [--runs N]
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import socket
import statistics
import struct
import subprocess
import time
import urllib.request

BLOCK = os.urandom(1 << 20)


def shapes(c):
    """Names and shapes of the weights, in the order of the layers."""
    hidden, inner, groups = c["hidden_size"], c["mamba_num_heads"] * c["mamba_head_dim"], c["n_groups"] * c["ssm_state_size"]
    heads, channels = c["mamba_num_heads"], inner + 2 * groups
    yield "backbone.embeddings.weight", [c["vocab_size"], hidden]
    for i, kind in enumerate(c["hybrid_override_pattern"]):
        at = f"backbone.layers.{i}"
        yield f"{at}.norm.weight", [hidden]
        if kind == "M":
            yield f"{at}.mixer.in_proj.weight", [inner + channels + heads, hidden]
            yield f"{at}.mixer.conv1d.weight", [channels, 1, c["conv_kernel"]]
            yield f"{at}.mixer.conv1d.bias", [channels]
            for name in ("A_log", "D", "dt_bias"):
                yield f"{at}.mixer.{name}", [heads]
            yield f"{at}.mixer.norm.weight", [inner]
            yield f"{at}.mixer.out_proj.weight", [hidden, inner]
        elif kind == "*":
            q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
            for name, shape in (("q", [q, hidden]), ("k", [kv, hidden]), ("v", [kv, hidden]), ("o", [hidden, q])):
                yield f"{at}.mixer.{name}_proj.weight", shape
        else:
            yield f"{at}.mixer.up_proj.weight", [c["intermediate_size"], hidden]
            yield f"{at}.mixer.down_proj.weight", [hidden, c["intermediate_size"]]
    yield "backbone.norm_f.weight", [hidden]
    yield "lm_head.weight", [c["vocab_size"], hidden]


def write_model(config, folder, tokenizer):
    c = json.loads(pathlib.Path(config).read_text())
    c["max_position_embeddings"] = 1 << 17
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c))
    shutil.copy(tokenizer, folder / "tokenizer.json")
    header, at = {}, 0
    for name, shape in shapes(c):
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Values of magnitudes up to 2^-6: a sign, an exponent of six below, and random bits.
    words = bytearray(BLOCK)
    for i in range(1, len(words), 2):
        words[i] = words[i] & 0x80 | 0x3C
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            file.write(words[: min(at, len(words))])
            at -= min(at, len(words))
    return c["vocab_size"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def serve(program, folder, device, *more):
    port = free_port()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(device)}
    command = [program, "serve", "-m", str(folder), "--backend", "cuda", "--port", str(port), "--step-tokens", "2048", *more]
    return subprocess.Popen(command, env=environment), f"http://127.0.0.1:{port}"


def wait_ready(url, process):
    while True:
        try:
            return urllib.request.urlopen(f"{url}/health").read()
        except OSError:
            assert process.poll() is None, "a server has ended"
            time.sleep(0.1)


def first_token(url, body):
    """Milliseconds until the first token has come."""
    data = json.dumps({**body, "stream": True}).encode()
    begin = time.monotonic()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        while not answer.readline().startswith(b"data:"):
            pass
        took = time.monotonic() - begin
        answer.read()
    return 1e3 * took


def metric(url, name):
    lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--selkie", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--dir", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", default="models/demo/tokenizer.json")
    parser.add_argument("--tokens", default="2048,8064,32704")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    vocabulary = write_model(args.config, args.dir, args.tokenizer)
    handover = free_port()
    servers = [
        serve(args.selkie, args.dir, 0, "--role", "prefill", "--handover-port", str(handover)),
        serve(args.selkie, args.dir, 1, "--role", "decode"),
    ]
    try:
        for process, url in servers:
            wait_ready(url, process)
        measure([url for _, url in servers], handover, vocabulary, args)
    finally:
        for process, _ in servers:
            process.kill()


def measure(urls, port, vocabulary, args):
    prefill, decode = urls
    pool = concurrent.futures.ThreadPoolExecutor(2)
    room = random.randrange(1 << 62)

    def both(ids):
        nonlocal room
        room += 1
        body = {"prompt": ids, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
        body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        other = pool.submit(first_token, prefill, body)
        took = first_token(decode, body)
        other.result()
        return took

    print("| tokens | alone | both | ratio | from the cache | MB | GB/s |")
    for tokens in map(int, args.tokens.split(",")):
        fresh = lambda: [random.randrange(3, vocabulary) for _ in range(tokens)]
        plain = lambda ids: first_token(prefill, {"prompt": ids, "max_tokens": 1, "ignore_eos": True})
        for _ in range(2):
            plain(fresh()), both(fresh())
        alone = [plain(fresh()) for _ in range(args.runs)]
        over = [both(fresh()) for _ in range(args.runs)]
        cached, before = [], metric(decode, "selkie:handover_bytes_total")
        for _ in range(args.runs):
            ids = fresh()
            plain(ids)
            cached.append(both(ids))
        sent = (metric(decode, "selkie:handover_bytes_total") - before) / args.runs
        alone, over, cached = map(statistics.median, (alone, over, cached))
        rate = sent / cached / 1e6
        print(f"| {tokens} | {alone:.1f} | {over:.1f} | {over / alone:.3f} | {cached:.1f} | {sent / 1e6:.0f} | {rate:.2f} |")
    print("not handed over:", metric(decode, 'selkie:handover_total{result="not"'))


if __name__ == "__main__":
    main()
