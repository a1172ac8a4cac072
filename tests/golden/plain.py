"""Zamba2 and Kimi-Linear from their formulas in numpy, in f64, token by token: independent of transformers and of selkie.
usage: plain.py check FOLDER       compares with the logits of a reference folder
       plain.py make OUTDIR        makes the folders zamba2_blocks and kimi_linear_groups
Keys and values of Kimi-Linear are expanded from the latents here, as they are defined; selkie brings queries to the latents."""
import json, os, sys
import numpy as np

def bf16(x):
    """Rounded to bf16, as f32."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7fff + ((u >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)

def read(path):
    data = open(path, 'rb').read()
    n = int.from_bytes(data[:8], 'little')
    def tensor(t):
        raw = data[8 + n + t['data_offsets'][0]:8 + n + t['data_offsets'][1]]
        kind = {'BF16': np.uint16, 'F32': np.float32, 'I32': np.int32}[t['dtype']]
        x = np.frombuffer(raw, kind).reshape(t['shape'])
        return (x.astype(np.uint32) << 16).view(np.float32) if t['dtype'] == 'BF16' else x
    return {k: tensor(t) for k, t in json.loads(data[8:8 + n]).items() if k != '__metadata__'}

def write(path, tensors, short):
    head, body = {}, b''
    for k in sorted(tensors):
        x = np.asarray(tensors[k])
        raw, kind = x.tobytes(), 'I32' if x.dtype == np.int32 else 'F32'
        if short:
            raw, kind = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes(), 'BF16'
        head[k] = dict(dtype=kind, shape=list(x.shape), data_offsets=[len(body), len(body) + len(raw)])
        body += raw
    text = json.dumps(head).encode()
    text += b' ' * (-len(text) % 8)
    open(path, 'wb').write(len(text).to_bytes(8, 'little') + text + body)

sigmoid = lambda x: 1 / (1 + np.exp(-x))
silu = lambda x: x * sigmoid(x)
softplus = lambda x: np.logaddexp(0, x)
rms = lambda x, w, eps: x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w
def gelu(x):
    from math import erf
    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

class Base:
    def __init__(self, c, w):
        self.c, self.w, self.s, self.position = c, {k: v.astype(np.float64) for k, v in w.items()}, {}, 0
    def mul(self, name, x):
        return self.w[name + '.weight'] @ x
    def conv(self, i, x, taps, bias):
        """taps [C, K]; keeps the last K inputs."""
        old = self.s.get((i, 'conv_states'), np.zeros_like(taps))
        new = self.s[i, 'conv_states'] = np.concatenate([old[:, 1:], x[:, None]], 1)
        return silu((new * taps).sum(1) + bias)
    def past(self, i, kind, x):
        all = self.s[i, kind] = np.concatenate([self.s[i, kind], x[None]]) if (i, kind) in self.s else x[None]
        return all
    def states(self):
        out = {}
        for (i, kind), x in self.s.items():
            name = kind if kind in ('keys', 'values') else kind + '.0'
            # [T, heads, dim] as [1, heads, T, dim]
            out[f'layer{i}.{name}'] = (np.swapaxes(x, 0, 1) if kind in ('keys', 'values') else x)[None].astype(np.float32)
        return out

class Zamba2(Base):
    def mamba(self, i, p, u):
        c = self.c
        d, h, n, g = c['mamba_expand'] * c['hidden_size'], c['n_mamba_heads'], c['mamba_d_state'], c['mamba_ngroups']
        z, xbc, dt = np.split(self.mul(p + 'in_proj', u), [d, 2 * d + 2 * g * n])
        xbc = self.conv(i, xbc, self.w[p + 'conv1d.weight'][:, 0], self.w[p + 'conv1d.bias'])
        x, b, cc = np.split(xbc, [d, d + g * n])
        x, b, cc = x.reshape(h, -1), np.repeat(b.reshape(g, n), h // g, 0), np.repeat(cc.reshape(g, n), h // g, 0)
        dt = softplus(dt + self.w[p + 'dt_bias'])
        old = self.s.get((i, 'recurrent_states'), np.zeros((h, d // h, n)))
        decay = np.exp(-dt * np.exp(self.w[p + 'A_log']))
        new = self.s[i, 'recurrent_states'] = decay[:, None, None] * old + (dt[:, None] * x)[:, :, None] * b[:, None]
        y = (new * cc[:, None]).sum(2) + self.w[p + 'D'][:, None] * x
        y = (y.reshape(-1) * silu(z)).reshape(g, -1)
        return self.mul(p + 'out_proj', rms(y, self.w[p + 'norm.weight'].reshape(g, -1), 1e-5).reshape(-1))
    def adapted(self, name, adapter, x):
        y = self.mul(name, x)
        return y + self.mul(adapter + '.1', self.mul(adapter + '.0', x)) if adapter + '.0.weight' in self.w else y
    def block(self, i, p, v, x):
        c, eps = self.c, self.c['rms_norm_eps']
        h = c['num_attention_heads']
        t = rms(x, self.w[p + 'input_layernorm.weight'], eps)
        q, k, val = (self.adapted(f'{p}self_attn.{a}_proj', f'{p}self_attn.linear_{a}_adapter_list.{v}', t) for a in 'qkv')
        hd = len(q) // h
        q, k, val = q.reshape(h, hd), k.reshape(-1, hd), val.reshape(-1, hd)
        if c['use_mem_rope']:
            a = self.position * c['rope_parameters']['rope_theta'] ** (-2 * np.arange(hd // 2) / hd)
            turn = lambda m: np.concatenate([m[:, :hd // 2] * np.cos(a) - m[:, hd // 2:] * np.sin(a), m[:, hd // 2:] * np.cos(a) + m[:, :hd // 2] * np.sin(a)], 1)
            q, k = turn(q), turn(k)
        keys, values = self.past(i, 'keys', k), self.past(i, 'values', val)
        r = h // k.shape[0]
        keys, values = np.repeat(keys, r, 1), np.repeat(values, r, 1)
        a = softmax(np.einsum('hd,thd->ht', q, keys) * (hd / 2) ** -0.5)
        t = self.mul(p + 'self_attn.o_proj', np.einsum('ht,thd->hd', a, values).reshape(-1))
        t = rms(t, self.w[p + 'pre_ff_layernorm.weight'], eps)
        gate, up = np.split(self.adapted(p + 'feed_forward.gate_up_proj', f'{p}feed_forward.gate_up_proj_adapter_list.{v}', t), 2)
        return self.mul(p + 'feed_forward.down_proj', gelu(gate) * up)
    def step(self, token):
        c, eps = self.c, self.c['rms_norm_eps']
        first = x = self.w['model.embed_tokens.weight'][token]
        hybrid = [i for i, t in enumerate(c['layers_block_type']) if t == 'hybrid']
        for i in range(c['num_hidden_layers']):
            p, t = f'model.layers.{i}.', 0
            if i in hybrid:
                v = hybrid.index(i)
                owner = hybrid[v % c['num_mem_blocks']]
                t = self.mul(p + 'linear', self.block(i, f'model.layers.{owner}.shared_transformer.', v, np.concatenate([x, first])))
                p += 'mamba_decoder.'
            x = x + self.mamba(i, p + 'mamba.', rms(x + t, self.w[p + 'input_layernorm.weight'], eps))
        self.position += 1
        return self.w['model.embed_tokens.weight'] @ rms(x, self.w['model.final_layernorm.weight'], eps)

class KimiLinear(Base):
    def delta(self, i, p, u):
        h, d = self.c['linear_num_heads'], self.c['linear_head_dim']
        qkv = np.concatenate([self.mul(f'{p}{a}_proj', u) for a in 'qkv'])
        taps = np.concatenate([self.w[f'{p}{a}_conv1d.weight'].reshape(h * d, -1) for a in 'qkv'])
        q, k, v = self.conv(i, qkv, taps, 0).reshape(3, h, d)
        unit = lambda x: x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6)
        q, k = unit(q) * d ** -0.5, unit(k)
        g = (self.mul(p + 'f_b_proj', self.mul(p + 'f_a_proj', u)) + self.w[p + 'dt_bias']).reshape(h, d)
        decay = np.exp(-np.exp(self.w[p + 'A_log'].reshape(h, 1)) * softplus(g))
        beta = sigmoid(self.mul(p + 'b_proj', u))[:, None]
        s = decay[:, :, None] * self.s.get((i, 'recurrent_states'), np.zeros((h, d, d)))
        s = s + k[:, :, None] * (beta * (v - np.einsum('hkv,hk->hv', s, k)))[:, None]
        self.s[i, 'recurrent_states'] = s
        o = rms(np.einsum('hkv,hk->hv', s, q), self.w[p + 'o_norm.weight'], self.c['rms_norm_eps'])
        z = self.mul(p + 'g_b_proj', self.mul(p + 'g_a_proj', u)).reshape(h, d)
        return self.mul(p + 'o_proj', (o * sigmoid(z)).reshape(-1))
    def attention(self, i, p, u):
        c = self.c
        h, r, dn, dv = c['num_attention_heads'], c['kv_lora_rank'], c['qk_nope_head_dim'], c['v_head_dim']
        if c.get('q_lora_rank'):
            q = self.mul(p + 'q_b_proj', rms(self.mul(p + 'q_a_proj', u), self.w[p + 'q_a_layernorm.weight'], 1e-6))
        else:
            q = self.mul(p + 'q_proj', u)
        q = q.reshape(h, -1)
        kv = self.mul(p + 'kv_a_proj_with_mqa', u)
        latents = self.past(i, 'keys', rms(kv[:r], self.w[p + 'kv_a_layernorm.weight'], 1e-6)[None])[:, 0]
        shared = self.past(i, 'values', kv[None, r:])[:, 0]
        expanded = (latents @ self.w[p + 'kv_b_proj.weight'].T).reshape(len(latents), h, dn + dv)
        scores = np.einsum('hd,thd->ht', q[:, :dn], expanded[:, :, :dn]) + q[:, dn:] @ shared.T
        a = softmax(scores * q.shape[1] ** -0.5)
        return self.mul(p + 'o_proj', np.einsum('ht,thd->hd', a, expanded[:, :, dn:]).reshape(-1))
    def swiglu(self, names, u):
        gate, up, down = names
        return self.mul(down, silu(self.mul(gate, u)) * self.mul(up, u))
    def experts(self, p, u):
        c = self.c
        s = sigmoid(self.mul(p + 'gate', u))
        choice = s + self.w[p + 'gate.e_score_correction_bias']
        groups = choice.reshape(c['num_expert_group'], -1)
        score = np.sort(groups, 1)[:, -2:].sum(1)
        dropped = np.argsort(-score)[c['topk_group']:]
        groups[dropped] = -np.inf
        chosen = np.argsort(-choice)[:c['num_experts_per_token']]
        weights = s[chosen]
        if c['moe_renormalize']:
            weights = weights / (weights.sum() + 1e-20)
        out = sum(w * c['routed_scaling_factor'] * self.swiglu([f'{p}experts.{e}.{n}' for n in ('w1', 'w3', 'w2')], u) for e, w in zip(chosen, weights))
        return out + self.swiglu([f'{p}shared_experts.{n}_proj' for n in ('gate', 'up', 'down')], u)
    def step(self, token):
        c, eps = self.c, self.c['rms_norm_eps']
        x = self.w['model.embed_tokens.weight'][token]
        for i, (mixer, mlp) in enumerate(zip(c['layer_types'], c['mlp_layer_types'])):
            p = f'model.layers.{i}.'
            u = rms(x, self.w[p + 'input_layernorm.weight'], eps)
            x = x + (self.delta if mixer == 'linear_attention' else self.attention)(i, p + 'self_attn.', u)
            u = rms(x, self.w[p + 'post_attention_layernorm.weight'], eps)
            p += 'block_sparse_moe.'
            dense = lambda u: self.swiglu([f'{p}{n}_proj' for n in ('gate', 'up', 'down')], u)
            x = x + (dense(u) if mlp == 'dense' else self.experts(p, u))
        self.position += 1
        return self.w['lm_head.weight'] @ rms(x, self.w['model.norm.weight'], eps)

MODELS = dict(zamba2=Zamba2, kimi_linear=KimiLinear)

def check(folder):
    c, ref = json.load(open(folder + '/config.json')), read(folder + '/reference.safetensors')
    for i in range(2):
        m = MODELS[c['model_type']](c, read(folder + '/model.safetensors'))
        got, want = np.array([m.step(t) for t in ref[f'prompt{i}.input_ids']]), ref[f'prompt{i}.logits']
        worst = np.abs(got - want) / (1 + np.abs(want))
        print(folder, i, 'logits', worst.max())
        for name, x in m.states().items():
            if f'prompt{i}.state.{name}' in ref:
                want = ref[f'prompt{i}.state.{name}'].reshape(x.shape)
                print('   ', name, (np.abs(x - want) / (1 + np.abs(want))).max())

def zamba2_shapes(c):
    d, r, i = c['hidden_size'], c['adapter_rank'], c['intermediate_size']
    inner, h, gn = c['mamba_expand'] * d, c['n_mamba_heads'], c['mamba_ngroups'] * c['mamba_d_state']
    kv = 2 * d // c['num_attention_heads'] * c['num_key_value_heads']
    yield 'model.embed_tokens.weight', (c['vocab_size'], d)
    yield 'model.final_layernorm.weight', (d,)
    uses = -1
    for l, kind in enumerate(c['layers_block_type']):
        p = f'model.layers.{l}.'
        if kind == 'hybrid':
            uses += 1
            yield p + 'linear.weight', (d, d)
            if uses < c['num_mem_blocks']:
                s = p + 'shared_transformer.'
                yield from [(s + 'input_layernorm.weight', (2 * d,)), (s + 'pre_ff_layernorm.weight', (d,)), (s + 'self_attn.o_proj.weight', (d, 2 * d)),
                            (s + 'feed_forward.gate_up_proj.weight', (2 * i, d)), (s + 'feed_forward.down_proj.weight', (d, i))]
                for a, n in [('q', 2 * d), ('k', kv), ('v', kv)]:
                    yield f'{s}self_attn.{a}_proj.weight', (n, 2 * d)
                for v in range(uses, c['layers_block_type'].count('hybrid'), c['num_mem_blocks']):
                    yield from [(f'{s}feed_forward.gate_up_proj_adapter_list.{v}.0.weight', (r, d)), (f'{s}feed_forward.gate_up_proj_adapter_list.{v}.1.weight', (2 * i, r))]
                    if c['use_shared_attention_adapter']:
                        for a, n in [('q', 2 * d), ('k', kv), ('v', kv)]:
                            yield from [(f'{s}self_attn.linear_{a}_adapter_list.{v}.0.weight', (r, 2 * d)), (f'{s}self_attn.linear_{a}_adapter_list.{v}.1.weight', (n, r))]
            p += 'mamba_decoder.'
        yield p + 'input_layernorm.weight', (d,)
        m = p + 'mamba.'
        yield from [(m + 'in_proj.weight', (2 * inner + 2 * gn + h, d)), (m + 'out_proj.weight', (d, inner)), (m + 'norm.weight', (inner,)), (m + 'A_log', (h,)), (m + 'D', (h,)),
                    (m + 'dt_bias', (h,)), (m + 'conv1d.weight', (inner + 2 * gn, 1, c['mamba_d_conv'])), (m + 'conv1d.bias', (inner + 2 * gn,))]

def kimi_linear_shapes(c):
    d, h, hd, e = c['hidden_size'], c['linear_num_heads'], c['linear_head_dim'], c['moe_intermediate_size']
    yield 'model.embed_tokens.weight', (c['vocab_size'], d)
    yield 'lm_head.weight', (c['vocab_size'], d)
    yield 'model.norm.weight', (d,)
    for l, (mixer, mlp) in enumerate(zip(c['layer_types'], c['mlp_layer_types'])):
        p, s, m = (f'model.layers.{l}.' + x for x in ('', 'self_attn.', 'block_sparse_moe.'))
        yield from [(p + 'input_layernorm.weight', (d,)), (p + 'post_attention_layernorm.weight', (d,))]
        if mixer == 'linear_attention':
            for a in 'qkv':
                yield from [(f'{s}{a}_proj.weight', (h * hd, d)), (f'{s}{a}_conv1d.weight', (h * hd, c['linear_conv_kernel_dim']))]
            for a in 'fg':
                yield from [(f'{s}{a}_a_proj.weight', (hd, d)), (f'{s}{a}_b_proj.weight', (h * hd, hd))]
            yield from [(s + 'b_proj.weight', (h, d)), (s + 'o_norm.weight', (hd,)), (s + 'o_proj.weight', (d, h * hd)), (s + 'A_log', (h,)), (s + 'dt_bias', (h * hd,))]
        else:
            n, r, q, k, v = c['num_attention_heads'], c['kv_lora_rank'], c['q_lora_rank'], c['qk_nope_head_dim'], c['v_head_dim']
            shared = c['qk_rope_head_dim']
            yield from [(s + 'q_a_proj.weight', (q, d)), (s + 'q_a_layernorm.weight', (q,)), (s + 'q_b_proj.weight', (n * (k + shared), q)), (s + 'kv_a_proj_with_mqa.weight', (r + shared, d)),
                        (s + 'kv_a_layernorm.weight', (r,)), (s + 'kv_b_proj.weight', (n * (k + v), r)), (s + 'o_proj.weight', (d, n * v))]
        three = lambda p, i, names: [(f'{p}{names[0]}.weight', (i, d)), (f'{p}{names[1]}.weight', (i, d)), (f'{p}{names[2]}.weight', (d, i))]
        usual = ('gate_proj', 'up_proj', 'down_proj')
        if mlp == 'dense':
            yield from three(m, c['intermediate_size'], usual)
        else:
            yield from [(m + 'gate.weight', (c['num_experts'], d)), (m + 'gate.e_score_correction_bias', (c['num_experts'],))]
            for x in range(c['num_experts']):
                yield from three(f'{m}experts.{x}.', e, ('w1', 'w3', 'w2'))
            yield from three(m + 'shared_experts.', e * c['num_shared_experts'], usual)

def value(name, shape, tied, r):
    n, leaf = r.standard_normal(shape), name.split('.')[-1]
    if leaf == 'A_log': v = np.log(r.uniform(0.3, 8.0, shape))
    elif leaf == 'dt_bias': v = r.uniform(-4.0, 0.5, shape)
    elif leaf == 'D': v = 1 + 0.3 * n
    elif len(shape) == 1: v = 0.1 * n + ('norm' in name)
    elif 'embed' in name: v = n * (0.1 if tied else 1.0)
    # Small, so that roundings are not amplified from block to block.
    elif name.endswith('.linear.weight'): v = n * 0.3 * shape[-1] ** -0.5
    else: v = n * shape[-1] ** -0.5
    return bf16(v)

def make(out):
    common = dict(vocab_size=320, pad_token_id=0, bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-5, dtype='bfloat16')
    zamba2 = dict(model_type='zamba2', hidden_size=48, num_hidden_layers=5, layers_block_type=['mamba', 'hybrid', 'hybrid', 'mamba', 'hybrid'], num_mem_blocks=2, adapter_rank=12,
                  use_shared_attention_adapter=True, use_mem_rope=True, rope_parameters=dict(rope_type='default', rope_theta=5000.0), num_attention_heads=4, num_key_value_heads=2, intermediate_size=56,
                  hidden_act='gelu', mamba_d_state=20, mamba_d_conv=4, mamba_expand=2, mamba_ngroups=2, n_mamba_heads=8, max_position_embeddings=4096, tie_word_embeddings=True, **common)
    kimi = dict(model_type='kimi_linear', hidden_size=48, num_hidden_layers=4, layer_types=['full_attention', 'linear_attention', 'full_attention', 'linear_attention'],
                mlp_layer_types=['sparse', 'dense', 'sparse', 'sparse'], linear_num_heads=3, linear_head_dim=20, linear_conv_kernel_dim=3, num_attention_heads=5, num_key_value_heads=5, head_dim=8, kv_lora_rank=36, q_lora_rank=28,
                qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20, intermediate_size=72, moe_intermediate_size=24, num_experts=12, num_experts_per_token=3, num_expert_group=4, topk_group=2,
                num_shared_experts=2, moe_renormalize=False, routed_scaling_factor=1.7, hidden_act='silu', model_max_length=4096, tie_word_embeddings=False, **common)
    for name, c, shapes, seed in [('zamba2_blocks', zamba2, zamba2_shapes, 20), ('kimi_linear_groups', kimi, kimi_linear_shapes, 11)]:
        r = np.random.default_rng(seed)
        weights = {k: value(k, s, c['tie_word_embeddings'], r) for k, s in shapes(c)}
        # The bias for the choice of experts is not a trained weight.
        params = sum(w.size for k, w in weights.items() if 'e_score_correction_bias' not in k)
        rec, meta = {}, dict(numpy=np.__version__, seed=seed, model_type=c['model_type'], params=params, prompts=[], max_new=24)
        for i, n in enumerate([37, 131]):
            m, ids = MODELS[c['model_type']](c, weights), r.integers(3, 320, n)
            logits = np.array([m.step(t) for t in ids])
            if i == 1:
                rec.update({f'prompt{i}.state.{k}': x for k, x in m.states().items()})
            toks, steps = [], []
            for _ in range(24):
                toks.append(int((steps or logits)[-1].argmax()))
                steps.append(m.step(toks[-1]))
            f32 = lambda x: np.array(x, np.float32)
            rec.update({f'prompt{i}.input_ids': ids.astype(np.int32), f'prompt{i}.logits': f32(logits), f'prompt{i}.greedy_ids': np.array(toks, np.int32), f'prompt{i}.greedy_logits': f32(steps)})
            top = np.sort(np.array(steps), 1)
            meta['prompts'].append(dict(len=n, logit_std=float(logits.std()), top1_margin_min=float((top[:, -1] - top[:, -2]).min())))
        os.makedirs(f'{out}/{name}', exist_ok=True)
        write(f'{out}/{name}/model.safetensors', weights, True)
        write(f'{out}/{name}/reference.safetensors', rec, False)
        json.dump(c, open(f'{out}/{name}/config.json', 'w'), indent=1)
        json.dump(meta, open(f'{out}/{name}/reference.json', 'w'), indent=1)
        print(name, meta)

if __name__ == '__main__':
    if sys.argv[1] == 'check': check(sys.argv[2])
    else: make(sys.argv[2])
