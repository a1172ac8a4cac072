"""Trains a head for drafts (MTP) for the demo model, whose own weights stay as they are, bit for bit, and measures how many of its drafts are right.
usage: train_head.py MODELDIR OUTDIR SECONDS [DATA]     (SECONDS: from the start to the last training step; MODELDIR: model.safetensors, config.json, tokenizer.json)
       train_head.py rows MODELDIR DATA SECONDS         (makes rows beforehand, which DATA names above)
       train_head.py measure MODELDIR                   (only measures a model with a head)

The head embeds a token beside the trunk's final hidden vector of the token before (after the last norm), each normed, and predicts the token that comes next. More
drafts come from the head's own result in place of that vector. So it is trained in STEPS passes: pass k starts at every token at once, sees keys of pass 1
up to there, and its own ones of the passes since."""
import glob, json, multiprocessing as mp, os, random, shutil, sys, time
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
from tokenizers import Tokenizer
import train_demo as demo, storyworld
from train_demo import A_, AD, H, NH, NKV, RMS, V

STEPS = 4                                       # passes in training
T = demo.T = int(os.environ.get("T", 1024))      # shorter rows than the trunk's; longer documents are left out
BS = int(os.environ.get("BS", 32))
WEIGHT = [.05, 1., 1.]                          # of the loss: what the user says, answers, tales
LR, LR_MUON, HOLD = 2e-3, .02, .3               # HOLD: share of the time before the rates fall


# ---- the head, with the names of the checkpoint behind `mtp.`
class First(nn.Module):
    def __init__(s):
        super().__init__()
        s.enorm, s.hnorm, s.norm, s.mixer = RMS(H), RMS(H), RMS(H), demo.Attn()
        s.eh_proj = nn.Linear(2 * H, H, bias=False)


class Second(nn.Module):
    def __init__(s):
        super().__init__()
        s.norm, s.mixer, s.final_layernorm = RMS(H), demo.MLP(), RMS(H)


class Head(nn.Module):
    def __init__(s):
        super().__init__()
        s.layers = nn.ModuleList([First(), Second()])

    def start(s, trunk):
        """Starts as the trunk's last attention and MLP, over its hidden vector and a little of the embedding."""
        a, b = s.layers
        attention, mlp = [max(i for i, k in enumerate(demo.PATTERN) if k == kind) for kind in "*-"]
        for mine, theirs in [(a.norm, trunk.layers[attention].norm), (a.mixer, trunk.layers[attention].mixer), (b.norm, trunk.layers[mlp].norm), (b.mixer, trunk.layers[mlp].mixer), (b.final_layernorm, trunk.norm_f)]:
            mine.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            a.eh_proj.weight.normal_(std=.3 * H ** -.5)
            a.eh_proj.weight[:, H:] += torch.eye(H, device=a.eh_proj.weight.device)

    def forward(s, embedded, hidden, past, mask):
        """Results for one pass. `past`: keys and values of the passes before, to which this one's are added."""
        a, b = s.layers
        x = a.eh_proj(torch.cat([a.enorm(embedded), a.hnorm(hidden)], -1))
        x = x + attention(a.mixer, a.norm(x), mask, past)
        x = x + b.mixer(b.norm(x), None, None)
        return b.final_layernorm(x)


def attention(mixer, u, mask, past):
    """Attention over `past`, to which the keys and values of `u` are added. Without compilation, which would take longer than the training."""
    n, l, _ = u.shape
    q, k, v = (w(u).view(n, l, heads, AD).transpose(1, 2) for w, heads in [(mixer.q_proj, NH), (mixer.k_proj, NKV), (mixer.v_proj, NKV)])
    past.append((k, v))
    keys, values = (torch.cat([p[i] for p in past], 2).repeat_interleave(NH // NKV, 1) for i in (0, 1))
    o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return mixer.o_proj(o.transpose(1, 2).reshape(n, l, -1))


def trunk_hidden(net, ids, pos, mask):
    x = net.backbone.embeddings(ids)
    for layer in net.backbone.layers:
        u = layer.norm(x)
        x = x + (attention(layer.mixer, u, mask, []) if isinstance(layer.mixer, demo.Attn) else layer.mixer(u, pos, None))
    return net.backbone.norm_f(x)


def ahead(x, k):
    """Row i + k in place of row i, and zeros at the end."""
    return x if k == 0 else torch.cat([x[:, k:], torch.zeros_like(x[:, :k])], 1)


def passes(net, head, ids, hidden, masks):
    """What each pass predicts, as logits: pass k at place i stands for the token at i + k + 1, from the true tokens up to i + k."""
    before, past, all_ = F.pad(hidden[:, :-1], (0, 0, 1, 0)), [], []
    for k, mask in enumerate(masks):
        before = head(net.backbone.embeddings(ahead(ids, k)), before, past, mask)
        all_.append(net.lm_head(before))
    return all_


def masks_of(doc, pos, steps):
    """The trunk's mask, and those of the passes: pass k sees what pass 1 has of its document up to its start, without the document's first token (which has
    none before it), and its own chain."""
    l = doc.shape[1]; at = torch.arange(l, device=doc.device)
    trunk = (doc[:, :, None] == doc[:, None]) & (at[:, None] >= at)
    own = (at[:, None] == at).expand_as(trunk)
    first = trunk & (pos > 0)[:, None] | own    # a first token has no other, and its row counts nowhere
    return trunk[:, None], [torch.cat([first] + [own] * k, 2)[:, None] for k in range(steps)]


def loss(net, head, ids, targets, weights, pos, doc):
    """Distance from the trunk's own predictions. A pass whose earlier ones were wrong counts little: its draft would not be used. Also shares of right argmaxes where those before were right."""
    with torch.no_grad():
        mask, masks = masks_of(doc, pos, STEPS)
        hidden = trunk_hidden(net, ids, pos, mask)
        truth = net.lm_head(hidden).float()
    total, right, told = 0., (pos > 0).float(), []
    for k, logits in enumerate(passes(net, head, ids, hidden, masks)):
        w = ahead(weights, k) * (doc == ahead(doc, k)) * (pos > 0)
        p = ahead(truth, k).log_softmax(-1)
        kl = (p.exp() * (p - logits.float().log_softmax(-1))).sum(-1)
        total = total + (kl * w * (.1 + .9 * right)).sum() / weights.sum()
        hit = (logits.argmax(-1) == ahead(targets, k)).float()
        told.append(torch.stack([(right * hit * w).sum(), (right * w).sum()]))
        right = right * hit
    return total, torch.stack(told).detach()


# ---- what is right on worlds it never saw: the trunk answers greedily, and the head guesses at that
def table(net, head, tk, dev, n=256, seed=123454321):
    r = random.Random(seed)
    tales = [demo.storyworld.tell(r)[0] for _ in range(n)]
    tales = [[1] + tk.encode(f"<|user|>{q}<|assistant|>").ids for q in tales]
    questions = []
    while len(questions) < n:
        text, kinds = storyworld.chat(r)
        ids = [1] + tk.encode(text).ids
        if kinds[-1] in demo.STORY and len(ids) < 700: questions.append(ids[:len(ids) - ids[::-1].index(A_)])
    return {name: measure(net, head, prompts, dev, length) for name, prompts, length in [("stories", tales, 240), ("story questions", questions, 40)]}


def measure(net, head, prompts, dev, length, most=7):
    with torch.no_grad(), torch.autocast(dev, torch.bfloat16, enabled=dev == "cuda"):
        answers = demo.generate(net, prompts, dev, length)
        right = [0] * most; tried = [0] * most; steps = {1: 0, 3: 0, 7: 0}
        for o in range(0, len(prompts), 16):
            texts = [p + a for p, a in zip(prompts[o:o + 16], answers[o:o + 16])]
            l = -(-max(map(len, texts)) // demo.CH) * demo.CH
            ids = torch.tensor([t + [0] * (l - len(t)) for t in texts], device=dev)
            pos = torch.arange(l, device=dev).expand_as(ids)
            mask, masks = masks_of(torch.zeros_like(ids), pos, most)
            drafts = torch.stack([x.argmax(-1) for x in passes(net, head, ids, trunk_hidden(net, ids, pos, mask), masks)], -1).tolist()
            for text, p, d in zip(texts, prompts[o:o + 16], drafts):
                good = [next((k for k in range(most) if text[i + k + 1:i + k + 2] != [d[i][k]]), most) for i in range(len(text))]
                for count in steps: steps[count] += walk(good, len(p), len(text), count)
                for i in range(len(p), len(text) - 1):
                    for k in range(min(good[i] + 1, most, len(text) - 1 - i)): tried[k] += 1; right[k] += k < good[i]
    tokens = sum(map(len, answers))
    return dict(tokens=tokens, right_at=[round(a / max(b, 1), 4) for a, b in zip(right, tried)], tokens_per_step={k: round(tokens / s, 3) for k, s in steps.items()})


def walk(good, start, end, most):
    """Steps of an engine for the tokens from `start` on; the first one ends the prompt and has no drafts."""
    at, steps = start, 1
    while at < end - 1: at, steps = at + 1 + min(good[at], most), steps + 1
    return steps


# ---- the trunk's file with the head behind it
def export(source, out, head):
    old = open(f"{source}/model.safetensors", "rb").read()
    size = int.from_bytes(old[:8], "little"); names, data = json.loads(old[8:8 + size]), old[8 + size:]
    kept = {k: v for k, v in names.items() if not k.startswith("mtp.")}
    end = max(v["data_offsets"][1] for k, v in kept.items() if k != "__metadata__")
    data = bytearray(data[:end])
    for name, v in head.state_dict().items():
        raw = v.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes()
        kept["mtp." + name] = dict(dtype="BF16", shape=list(v.shape), data_offsets=[len(data), len(data) + len(raw)])
        data += raw
    text = json.dumps(kept, separators=(",", ":")).encode(); text += b" " * (-len(text) % 8)
    open(f"{out}/model.safetensors", "wb").write(len(text).to_bytes(8, "little") + text + data)
    config = json.load(open(f"{source}/config.json"))
    config.update(num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*-", mtp_layers_block_type=["full_attention", "mlp"])
    json.dump(config, open(f"{out}/config.json", "w"), indent=2, sort_keys=True); open(f"{out}/config.json", "a").write("\n")
    same_trunk(f"{source}/model.safetensors", f"{out}/model.safetensors")


def same_trunk(old, new):
    from safetensors.torch import load_file
    a, b = load_file(old), load_file(new)
    for name in (k for k in a if not k.startswith("mtp.")):
        x, y = a[name], b[name]
        assert x.dtype == y.dtype and x.shape == y.shape and x.view(torch.uint8).equal(y.view(torch.uint8)), name
    print("the trunk's", sum(not k.startswith("mtp.") for k in a), "tensors are the same; the head has", sum(v.numel() for k, v in b.items() if k.startswith("mtp.")), "parameters", flush=True)


# ---- training
class Rows:
    """Fresh rows of whole documents, made by other processes, after those that lie ready."""
    def __init__(s, out, dev, ready, cap=200_000):
        s.out, s.have, s.got, s.buf = out, 0, 0, torch.zeros(cap if dev == "cuda" else 1000, T + 1, dtype=torch.int16, device=dev)
        count = max(1, min(14, os.cpu_count() - 1))
        s.workers = [mp.get_context("fork").Process(target=demo.worker, args=(9000 + i, out, 200), daemon=True) for i in range(count)]
        for p in s.workers: p.start()
        if ready: s.refill(ready, False)

    def refill(s, where=None, used_up=True):
        for f in glob.glob(f"{where or s.out + '/rows'}/r*.npy"):
            a = torch.from_numpy(np.load(f))
            if used_up: os.unlink(f)
            at = s.got % len(s.buf); a = a[:len(s.buf) - at]
            s.buf[at:at + len(a)] = a.to(s.buf.device)
            s.got += len(a); s.have = max(s.have, min(len(s.buf), at + len(a)))

    def batch(s):
        b = s.buf[torch.randint(0, s.have, (BS,), device=s.buf.device)].long()
        c, b = b >> 12, b & 4095
        x = b[:, :-1]; new = x == 1; at = torch.arange(T, device=x.device)
        pos = at - torch.where(new, at, 0).cummax(1).values
        weights = torch.tensor(WEIGHT, device=x.device)[c[:, 1:]] * (b[:, 1:] > 1)
        return x, b[:, 1:].contiguous(), weights, pos, new.int().cumsum(1, dtype=torch.int32)

    def end(s):
        shutil.rmtree(f"{s.out}/rows", ignore_errors=True)
        for p in s.workers: p.terminate()


class Steps:
    """Muon for the matrices, AdamW for the norms."""
    def __init__(s, head):
        s.matrices = [p for p in head.parameters() if p.dim() == 2]
        s.momenta = [torch.zeros_like(p) for p in s.matrices]
        s.norms = [p for p in head.parameters() if p.dim() == 1]
        s.adam = torch.optim.AdamW(s.norms, lr=LR, betas=(.9, .95), weight_decay=0.)

    @torch.no_grad()
    def step(s, rate, it):
        mu = .85 + .1 * min(1, it / 300)
        for p, m in zip(s.matrices, s.momenta):
            m.lerp_(p.grad, 1 - mu); lr = LR_MUON * rate
            p.mul_(1 - lr * .03).add_(demo.orth(p.grad.lerp(m, mu)).float(), alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** .5)
        for g in s.adam.param_groups: g["lr"] = LR * rate
        s.adam.step()
        for p in s.matrices + s.norms: p.grad = None


def load(source, dev):
    from safetensors.torch import load_file
    net = demo.LM(V).to(dev)
    net.load_state_dict({k: v.float() for k, v in load_file(f"{source}/model.safetensors").items() if not k.startswith("mtp.")})
    for p in net.parameters(): p.requires_grad_(False)
    head = Head().to(dev); head.start(net.backbone)
    own = {k[4:]: v.float() for k, v in load_file(f"{source}/model.safetensors").items() if k.startswith("mtp.")}
    if own: head.load_state_dict(own)
    return net, head


def train(net, head, rows, dev, began, seconds):
    steps, it, start, share, told = Steps(head), 0, None, 0., []
    while share < 1:
        with torch.autocast(dev, torch.bfloat16, enabled=dev == "cuda"): l, hits = loss(net, head, *rows.batch())
        l.backward()
        steps.step(min(1, (it + 1) / 100) * (1 if share < HOLD else max(.005, (1 - share) / (1 - HOLD))), it)
        it += 1; told.append((l.detach(), hits))
        if it == 3: start = time.time()
        if it % 20 == 0:
            if dev == "cuda": torch.cuda.synchronize()
            rows.refill(); share = (time.time() - start) / max(1, seconds - (start - began))
        if it % 100 == 0:
            h = torch.stack([t[1] for t in told]).sum(0)
            print(it, "loss", round(float(torch.stack([t[0] for t in told]).mean()), 4), "right", [round(float(a / b), 4) for a, b in h], f"{it * BS * T / 1e6:.1f}M tokens, fresh {rows.got * T / 1e6:.1f}M, {share:.2f} at {time.time() - began:.0f} s", flush=True); told = []


def make_rows(source, out, seconds):
    os.makedirs(f"{out}/rows", exist_ok=True); shutil.copy(f"{source}/tokenizer.json", out)
    p = mp.get_context("fork").Process(target=demo.worker, args=(8000, out, 10 ** 6), daemon=True); p.start(); time.sleep(seconds); p.terminate()
    for f in glob.glob(f"{out}/rows/r*.npy"): shutil.move(f, out)


def main():
    if sys.argv[1] == "rows": return make_rows(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    if sys.argv[1] == "measure":
        net, head = load(sys.argv[2], dev)
        return print(json.dumps(table(net, head, Tokenizer.from_file(f"{sys.argv[2]}/tokenizer.json"), dev, int(os.environ.get("N", 256)))))
    source, out, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3]); began = time.time()
    shutil.rmtree(out, ignore_errors=True); os.makedirs(f"{out}/rows"); os.environ["TOKENIZERS_PARALLELISM"] = "false"
    shutil.copy(f"{source}/tokenizer.json", out)
    rows = Rows(out, dev, sys.argv[4] if len(sys.argv) > 4 else None); torch.manual_seed(0); torch.set_float32_matmul_precision("high")
    net, head = load(source, dev)
    while rows.have < 100: rows.refill(); time.sleep(.2)
    print(rows.have, "rows at", round(time.time() - began), "s on", torch.cuda.get_device_name() if dev == "cuda" else dev, flush=True)
    train(net, head, rows, dev, began, seconds); rows.end()
    export(source, out, head); print("written at", round(time.time() - began), "s", flush=True)


if __name__ == "__main__": main()
