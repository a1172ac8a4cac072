"""Times other projects' kernels on one NVIDIA GPU beside `selkie bench ops`, alternately in one run, and prints the ratios.

usage: compare.py PEERS [SELKIE] [--rounds N] [--only TEXT] [--out FILE]

PEERS is a folder with the packages `mamba_ssm`, `fla` and `einops` as sources (README.md beside this file), SELKIE the binary;
without it only the others are timed.
torch and triton must be installed. Figures are microseconds, the better of the rounds: `cold` is one call after the L2 was
flushed, `net` = cold less what an empty kernel takes when timed alike, `warm` the mean of 20 calls in one CUDA graph.
"""
import argparse
import json
import subprocess
import sys
import time
import types

import torch
import torch.nn.functional as F
import triton

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("peers")
parser.add_argument("selkie", nargs="?")
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--only", default="", help="shapes whose id holds this text")
parser.add_argument("--out", help="write everything as JSON to this file")
args = parser.parse_args()

sys.path.insert(0, args.peers)
# The package's own __init__ wants a compiled extension; its Triton kernels do not.
mamba_ssm = types.ModuleType("mamba_ssm")
mamba_ssm.__path__ = [f"{args.peers}/mamba_ssm"]
sys.modules["mamba_ssm"] = mamba_ssm

from fla.modules.convolution import causal_conv1d
from fla.ops.kda import chunk_kda
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

BF16, F32 = torch.bfloat16, torch.float32
flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def random(*dims, dtype=BF16):
    return torch.randn(*dims, device="cuda", dtype=F32).to(dtype)


def uniform(*dims):
    return torch.rand(*dims, device="cuda", dtype=F32)


def stay_awake(seconds):
    """A light load: the SM clock falls without work, and matrix products would heat the chip until it lowers its clocks."""
    done, start = torch.cuda.Event(), time.time()
    while time.time() - start < seconds:
        for _ in range(20):
            flush.zero_()
        done.record()
        done.synchronize()


def play(graph, cold):
    if cold:
        flush.zero_()
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def median(times):
    return sorted(times)[len(times) // 2]


def measure(call):
    """Cold and warm microseconds of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    one, many = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(one):
        call()
    with torch.cuda.graph(many):
        for _ in range(20):
            call()
    stay_awake(0.1)
    return median([play(one, True) for _ in range(31)]), median([play(many, False) for _ in range(7)]) / 20


@triton.jit
def nothing(_):
    pass


def state_update(rows, dtype):
    h, p, n, g = 128, 64, 128, 8
    state, x, dt, b, c = random(rows, h, p, n, dtype=dtype), random(rows, h, p), random(rows, h), random(rows, g, n), random(rows, g, n)
    a, d, bias = -uniform(h) * 4 - 0.5, torch.ones(h, device="cuda"), uniform(h) - 4
    a, d, bias = a[:, None, None].expand(h, p, n), d[:, None].expand(h, p), bias[:, None].expand(h, p)
    dt = dt[..., None].expand(rows, h, p)
    return lambda: selective_state_update(state, x, dt, a, b, c, D=d, dt_bias=bias, dt_softplus=True)


def scan(tokens, chunk):
    h, p, n, g = 128, 64, 128, 8
    x, dt, b, c = random(1, tokens, h, p), random(1, tokens, h), random(1, tokens, g, n), random(1, tokens, g, n)
    a, d, bias = -uniform(h) * 4 - 0.5, torch.ones(h, device="cuda"), uniform(h) - 4
    return lambda: mamba_chunk_scan_combined(
        x, dt, a, b, c, chunk, D=d, dt_bias=bias, dt_softplus=True, return_final_states=True)


def delta(rows, tokens):
    """Prefill takes 16 key heads repeated to the 32 value heads, as the models' code does."""
    q, k, v = random(rows, tokens, 16, 128), random(rows, tokens, 16, 128), random(rows, tokens, 32, 128)
    q, k = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
    g, beta = -uniform(rows, tokens, 32), uniform(rows, tokens, 32).to(BF16)
    return lambda: chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)


def channel_delta(tokens):
    """Kimi-Linear's, with gates, beta and norms inside of the kernels, as selkie's op has them."""
    q, k, v, g = (random(1, tokens, 32, 128) for _ in range(4))
    b, a_log, bias = random(1, tokens, 32), torch.zeros(32, device="cuda"), -torch.ones(32 * 128, device="cuda")

    def call():
        with torch.inference_mode():
            return chunk_kda(
                q, k, v, g=g, beta=b, A_log=a_log, dt_bias=bias, output_final_state=True, use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)

    return call


def delta_step(rows):
    q, k, v = random(rows, 1, 32, 128), random(rows, 1, 32, 128), random(rows, 1, 32, 128)
    g, beta, state = -uniform(rows, 1, 32), uniform(rows, 1, 32).to(BF16), random(rows, 32, 128, 128, dtype=F32)
    return lambda: fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)


def convolution(tokens):
    x, weight, bias = random(1, tokens, 10240), random(10240, 4), random(10240)
    return lambda: causal_conv1d(x, weight, bias, activation="silu")


def linear(m, n, k):
    x, weight = random(m, k), random(n, k)
    return lambda: F.linear(x, weight)


def attention(rows, queries, keys, backend=None):
    q, k, v = random(rows, 32, queries, 128), random(rows, 8, keys, 128), random(rows, 8, keys, 128)

    def call():
        return F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=True)

    def with_backend():
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return call()

    return with_backend if backend else call


def peers():
    """(our shape, peer, function that makes the call)."""
    for dtype, suffix in ((F32, ""), (BF16, ", bf16 state")):
        for rows in (1, 8, 64, 256):
            yield f"selective_scan/decode of {rows}{suffix}", "mamba_ssm", lambda r=rows, d=dtype: state_update(r, d)
    for tokens in (2048, 8192, 32768):
        for chunk in (128, 256):
            yield f"selective_scan/prefill of {tokens}", f"mamba_ssm, chunks of {chunk}", lambda t=tokens, c=chunk: scan(t, c)
    for rows in (1, 8, 64, 256):
        yield f"gated_delta/decode of {rows}", "fla", lambda r=rows: delta_step(r)
    for rows, tokens in ((1, 2048), (1, 8192), (1, 32768), (8, 4096)):
        yield f"gated_delta/prefill of {rows} x {tokens}", "fla", lambda r=rows, t=tokens: delta(r, t)
    for tokens in (2048, 8192):
        yield f"gated_delta/prefill of {tokens}, Kimi-Linear", "fla", lambda t=tokens: channel_delta(t)
    for tokens in (2048, 8192):
        yield f"conv1d/prefill of {tokens}", "fla", lambda t=tokens: convolution(t)
    for n, k in ((18560, 4096), (21504, 4096), (4096, 21504), (131072, 4096)):
        for m in (1, 8, 64):
            yield f"matmul/{m} x {n} x {k}", "torch", lambda m=m, n=n, k=k: linear(m, n, k)
    for n, k in ((18560, 4096), (21504, 4096), (4096, 21504)):
        yield f"matmul/8192 x {n} x {k}", "torch", lambda n=n, k=k: linear(8192, n, k)
    for tokens in (2048, 8192):
        for backend, name in (("FLASH_ATTENTION", "FlashAttention 2"), ("CUDNN_ATTENTION", "cuDNN")):
            yield f"attention/prefill of {tokens}", name, lambda t=tokens, b=backend: attention(1, t, t, b)
    for rows, keys in ((1, 4096), (1, 32768), (64, 4096)):
        yield f"attention/decode of {rows} at {keys}", "torch", lambda r=rows, k=keys: attention(r, 1, k)


def keep_best(best, key, cold, net, warm):
    old = best.get(key)
    best[key] = dict(cold=cold, net=net, warm=warm) if old is None else dict(
        cold=min(old["cold"], cold), net=min(old["net"], net), warm=min(old["warm"], warm))


def selkie_round(best, notes):
    command = [args.selkie, "bench", "ops", "--backend", "cuda", "--json"] + ([args.only] if args.only else [])
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    report = json.loads(run.stdout)
    for row in report["shapes"]:
        key = f"{row['op']}/{row['shape']}"
        if "not_measured" in row:
            notes[key] = row["not_measured"]
        else:
            keep_best(best, key, row["cold_us"], row["net_us"], row["warm_us"])
    return report["device"], report["version"], report["cases"]


def peer_round(ours, best, notes):
    token = torch.zeros(1, dtype=torch.int32, device="cuda")
    stay_awake(0.4)
    empty, _ = measure(lambda: nothing[(1,)](token))
    for shape, peer, make in peers():
        if args.only not in shape:
            continue
        try:
            cold, warm = measure(make())
            keep_best(best, (shape, peer), cold, cold - empty, warm)
            show(shape, peer, ours.get(shape), best[shape, peer])
        except Exception as e:
            notes[f"{shape}, {peer}"] = repr(e)[:200]
        torch.cuda.empty_cache()


def columns(us):
    return f"{us['net']:>9.2f}{us['warm']:>9.2f}" if us else f"{'-':>9}{'-':>9}"


def show(shape, peer, us, them):
    ratio = f"{them['net'] / us['net']:>11.2f}{them['warm'] / us['warm']:>7.2f}" if us and them else ""
    print(f"{shape:<44}{columns(us)}  {peer:<28}{columns(them)}{ratio}", flush=True)


ours, theirs, notes = {}, {}, {}
device, version, cases = torch.cuda.get_device_name(), None, []
print(f"{device}, torch {torch.__version__}, triton {triton.__version__}; ratio = peer / selkie")
print(f"{'shape':<44}{'net':>9}{'warm':>9}  {'peer':<28}{'net':>9}{'warm':>9}{'ratio net':>11}{'warm':>7}")
for _ in range(args.rounds):
    if args.selkie:
        device, version, cases = selkie_round(ours, notes)
    peer_round(ours, theirs, notes)
for shape in ours.keys() - {shape for shape, _ in theirs}:
    show(shape, "-", ours[shape], None)
for what, why in notes.items():
    print(f"{what}: {why}")
if args.out:
    rows = [dict(shape=shape, selkie=ours.get(shape), peer=peer, peer_us=us) for (shape, peer), us in theirs.items()]
    with open(args.out, "w") as f:
        json.dump(dict(device=device, version=version, cases=cases, selkie=ours, rows=rows, notes=notes), f, indent=1)
