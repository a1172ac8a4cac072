"""reference.json and reference.safetensors of the demo model from the formulas of tests/heads/make.py in numpy, in f64, with the decoded
weights of its GGUF file: independent of selkie. The names and orders of rows in the file are written down here once more.
usage: reference.py MODELDIR OUTDIR     (MODELDIR: model.gguf, config.json, tokenizer.json, reference.json with the prompts; needs numpy, gguf, tokenizers)
Fails if an answer is another one than that of the prompts' file."""
import importlib.util, json, os, sys
import gguf, numpy as np, tokenizers
root = os.path.dirname(os.path.abspath(__file__)) + "/../../.."
spec = importlib.util.spec_from_file_location("heads", root + "/tests/heads/make.py"); heads = importlib.util.module_from_spec(spec); spec.loader.exec_module(heads)

ENDS = {"token_embd": "backbone.embeddings", "output": "lm_head", "output_norm": "backbone.norm_f"}
MIXER = {"ssm_in": "in_proj", "ssm_out": "out_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
BARE = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
HEAD = {"nextn.eh_proj": "0.eh_proj", "nextn.enorm": "0.enorm", "nextn.hnorm": "0.hnorm", "nextn.shared_head_norm": "1.final_layernorm", "attn_norm": "0.norm", "post_attention_norm": "1.norm"}

def name(stored, layers):
    """The family's name of a stored tensor."""
    stem, _, leaf = stored.rpartition(".")
    if not stored.startswith("blk."): return f"{ENDS[stem]}.{leaf}"
    _, number, rest = stored.split(".", 2)
    stem = rest.rpartition(".")[0]
    if int(number) == layers:
        return f"mtp.layers.{HEAD[stem]}.{leaf}" if stem in HEAD else f"mtp.layers.{int(stem.startswith('ffn'))}.mixer.{MIXER[stem]}.{leaf}"
    layer = f"backbone.layers.{number}."
    if rest in BARE: return f"{layer}mixer.{BARE[rest]}"
    return layer + ("norm." if stem == "attn_norm" else f"mixer.{MIXER[stem]}.") + leaf

def weights(path, c):
    """All weights in f32 by the family's names, in its order of rows."""
    w, layers = {}, len(c["layers_block_type"])
    for t in gguf.GGUFReader(path).tensors:
        shape, n = [int(x) for x in reversed(t.shape)], name(t.name, layers)
        x = gguf.quants.dequantize(t.data, t.tensor_type).reshape(shape).astype(np.float32)
        if n.endswith(("q_proj.weight", "k_proj.weight")):      # rows 2i + j of a head are i + j d/2 of the family's
            d = c["head_dim"]; x = x.reshape(-1, d // 2, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        if n.endswith("A_log"): x = np.log(-x)
        if n.endswith(("A_log", ".D", "mixer.norm.weight")): x = x.reshape(-1)
        if n.endswith("conv1d.weight"): x = x[:, None]
        w[n] = x
    return w

def answer(model, prompt, most):
    """Greedy ids after a prompt, and the logits from which each is chosen."""
    for t in prompt: row = model.step(t)
    ids, rows = [], []
    while len(ids) < most:
        rows.append(row); ids.append(int(row.argmax()))
        if ids[-1] == model.c["eos_token_id"]: break
        row = model.step(ids[-1])
    return ids, np.array(rows)

def main(source, out):
    c, entries = json.load(open(f"{source}/config.json")), json.load(open(f"{source}/reference.json"))
    w, tk, rec = weights(f"{source}/model.gguf", c), tokenizers.Tokenizer.from_file(f"{source}/tokenizer.json"), {}
    for i, e in enumerate(entries):
        ids, rows = answer(heads.Nemotron(c, w), e["prompt_ids"], 200)
        ended = ids[:-1] if ids[-1] == c["eos_token_id"] else ids
        assert ended == [t for t in e["answer_ids"] if t != c["eos_token_id"]] and tk.decode(ended) == e["answer"], (i, tk.decode(ids), e["answer"])
        rows, top = rows[:len(e["answer_ids"])], np.sort(rows[:len(e["answer_ids"])], 1)
        print(i, repr(e["answer"][:60]), "margin", e["min_margin"], "->", e.update(min_margin=float((top[:, -1] - top[:, -2]).min())) or e["min_margin"])
        if i in (0, 1, 2, 3, 4, 6, 8): rec[f"prompt{i}.logits"] = rows[:64].astype(np.float32)
    heads.write(f"{out}/reference.safetensors", rec, False); json.dump(entries, open(f"{out}/reference.json", "w"), indent=1)

if __name__ == "__main__": main(*sys.argv[1:])
