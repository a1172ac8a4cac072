"""Heads for drafts (MTP) of Qwen3-Next, Qwen3.5 and Nemotron-H from their formulas in numpy, in f64, token by token: independent of
selkie. The trunks are formulas too, which agree with the folders of tests/golden that transformers made.
usage: make.py check FOLDER    compares a trunk with the logits of a folder of tests/golden
       make.py make OUTDIR     makes the folders here"""
import json, os, sys
import numpy as np
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + '/../golden')
from plain import Base, read, write, bf16, rms, sigmoid, silu, softmax, softplus

class Model(Base):
    """A trunk whose step keeps the hidden vector, and its head. Keys and values of the head are rows by position."""
    def __init__(self, c, w):
        super().__init__(c, w)
        self.hidden, self.rows = None, {}
    def zero(self, name):
        return 1 + self.w[name + '.weight']
    def attend(self, q, keys, values):
        r = q.shape[0] // keys.shape[1]
        keys, values = np.repeat(keys, r, 1), np.repeat(values, r, 1)
        a = softmax(np.einsum('hd,thd->ht', q, keys) * q.shape[1] ** -0.5)
        return np.einsum('ht,thd->hd', a, values)
    def step(self, token):
        x = self.trunk(self.w[self.embedding][token])
        self.position += 1
        self.hidden = x
        return self.w['lm_head.weight'] @ x
    def head(self, token, hidden, position):
        """Logits after `token` at `position` and the head's own vector; `hidden` belongs to the position before."""
        own = self.layer(self.w[self.embedding][token], hidden, position)
        return self.w['lm_head.weight'] @ own, own
    def remember(self, position, k, v):
        """Keys and values of the head up to `position`; those of later ones are forgotten."""
        self.rows = {p: r for p, r in self.rows.items() if p < position}
        self.rows[position] = (k, v)
        return [np.array([self.rows[p][i] for p in sorted(self.rows)]) for i in (0, 1)]

class Qwen(Model):
    embedding = 'model.embed_tokens.weight'
    def rope(self, m, position):
        p = self.c['rope_parameters']
        r = int(m.shape[1] * p.get('partial_rotary_factor', 0.25))
        a = position * p['rope_theta'] ** (-2 * np.arange(r // 2) / r)
        x, y = m[:, :r // 2], m[:, r // 2:r]
        return np.concatenate([x * np.cos(a) - y * np.sin(a), y * np.cos(a) + x * np.sin(a), m[:, r:]], 1)
    def attention(self, p, u, position, past):
        c, eps = self.c, self.c['rms_norm_eps']
        h, d = c['num_attention_heads'], c['head_dim']
        q, gate = np.split(self.mul(p + 'q_proj', u).reshape(h, 2 * d), 2, 1)
        k, v = (self.mul(p + n, u).reshape(-1, d) for n in ('k_proj', 'v_proj'))
        q, k = rms(q, self.zero(p + 'q_norm'), eps), rms(k, self.zero(p + 'k_norm'), eps)
        keys, values = past(self.rope(k, position), v)
        return self.mul(p + 'o_proj', (self.attend(self.rope(q, position), keys, values) * sigmoid(gate)).reshape(-1))
    def delta(self, i, p, u):
        c = self.c
        hk, hv, dk, dv = (c['linear_' + n] for n in ('num_key_heads', 'num_value_heads', 'key_head_dim', 'value_head_dim'))
        if p + 'in_proj_qkvz.weight' in self.w:
            r = hv // hk
            groups = self.mul(p + 'in_proj_qkvz', u).reshape(hk, -1)
            q, k, v, z = np.split(groups, [dk, 2 * dk, 2 * dk + r * dv], 1)
            b, a = np.split(self.mul(p + 'in_proj_ba', u).reshape(hk, -1), 2, 1)
            qkv, z, b, a = np.concatenate([x.reshape(-1) for x in (q, k, v)]), z.reshape(-1), b.reshape(-1), a.reshape(-1)
        else:
            qkv, z, b, a = (self.mul(p + 'in_proj_' + n, u) for n in ('qkv', 'z', 'b', 'a'))
        q, k, v = np.split(self.conv(i, qkv, self.w[p + 'conv1d.weight'][:, 0], 0), [hk * dk, 2 * hk * dk])
        unit = lambda x: x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6)
        q, k = (np.repeat(unit(x.reshape(hk, dk)), hv // hk, 0) for x in (q, k))
        q, v = q * dk ** -0.5, v.reshape(hv, dv)
        s = np.exp(-np.exp(self.w[p + 'A_log']) * softplus(a + self.w[p + 'dt_bias']))[:, None, None] * self.s.get((i, 'recurrent_states'), np.zeros((hv, dk, dv)))
        s = s + k[:, :, None] * (sigmoid(b)[:, None] * (v - np.einsum('hkv,hk->hv', s, k)))[:, None]
        self.s[i, 'recurrent_states'] = s
        o = rms(np.einsum('hkv,hk->hv', s, q), self.w[p + 'norm.weight'], c['rms_norm_eps'])
        return self.mul(p + 'out_proj', (o * silu(z.reshape(hv, dv))).reshape(-1))
    def swiglu(self, p, u):
        return self.mul(p + 'down_proj', silu(self.mul(p + 'gate_proj', u)) * self.mul(p + 'up_proj', u))
    def feed_forward(self, p, u):
        if p + 'gate.weight' not in self.w:
            return self.swiglu(p, u)
        w = softmax(self.mul(p + 'gate', u))
        chosen = np.argsort(-w)[:self.c['num_experts_per_tok']]
        out = sum(w[e] / w[chosen].sum() * self.swiglu(f'{p}experts.{e}.', u) for e in chosen)
        return out + sigmoid(self.mul(p + 'shared_expert_gate', u)) * self.swiglu(p + 'shared_expert.', u)
    def norm(self, name, x):
        return rms(x, self.zero(name), self.c['rms_norm_eps'])
    def trunk(self, x):
        for i, kind in enumerate(self.c['layer_types']):
            p = f'model.layers.{i}.'
            u = self.norm(p + 'input_layernorm', x)
            past = lambda k, v: (self.past(i, 'keys', k), self.past(i, 'values', v))
            x = x + (self.delta(i, p + 'linear_attn.', u) if kind == 'linear_attention' else self.attention(p + 'self_attn.', u, self.position, past))
            x = x + self.feed_forward(p + 'mlp.', self.norm(p + 'post_attention_layernorm', x))
        return self.norm('model.norm', x)
    def layer(self, e, hidden, position):
        p = 'mtp.layers.0.'
        x = self.mul('mtp.fc', np.concatenate([self.norm('mtp.pre_fc_norm_embedding', e), self.norm('mtp.pre_fc_norm_hidden', hidden)]))
        x = x + self.attention(p + 'self_attn.', self.norm(p + 'input_layernorm', x), position, lambda k, v: self.remember(position, k, v))
        x = x + self.feed_forward(p + 'mlp.', self.norm(p + 'post_attention_layernorm', x))
        return self.norm('mtp.norm', x)

class Nemotron(Model):
    embedding = 'backbone.embeddings.weight'
    def mamba(self, i, p, u):
        c = self.c
        h, hd, n, g = c['mamba_num_heads'], c['mamba_head_dim'], c['ssm_state_size'], c['n_groups']
        d = h * hd
        z, xbc, dt = np.split(self.mul(p + 'in_proj', u), [d, 2 * d + 2 * g * n])
        x, b, cc = np.split(self.conv(i, xbc, self.w[p + 'conv1d.weight'][:, 0], self.w[p + 'conv1d.bias']), [d, d + g * n])
        x, b, cc = x.reshape(h, hd), np.repeat(b.reshape(g, n), h // g, 0), np.repeat(cc.reshape(g, n), h // g, 0)
        dt = softplus(dt + self.w[p + 'dt_bias'])
        s = np.exp(-dt * np.exp(self.w[p + 'A_log']))[:, None, None] * self.s.get((i, 'recurrent_states'), np.zeros((h, hd, n)))
        s = self.s[i, 'recurrent_states'] = s + (dt[:, None] * x)[:, :, None] * b[:, None]
        y = (s * cc[:, None]).sum(2) + self.w[p + 'D'][:, None] * x
        y = (y.reshape(-1) * silu(z)).reshape(g, -1)
        return self.mul(p + 'out_proj', rms(y, self.w[p + 'norm.weight'].reshape(g, -1), c['layer_norm_epsilon']).reshape(-1))
    def attention(self, p, u, past):
        h, d = self.c['num_attention_heads'], self.c['head_dim']
        q, k, v = (self.mul(p + n + '_proj', u).reshape(-1, d) for n in 'qkv')
        keys, values = past(k, v)
        return self.mul(p + 'o_proj', self.attend(q, keys, values).reshape(-1))
    def relu2(self, p, u):
        return self.mul(p + 'down_proj', np.maximum(self.mul(p + 'up_proj', u), 0) ** 2)
    def experts(self, p, u):
        c = self.c
        s = sigmoid(self.mul(p + 'gate', u))
        choice = (s + self.w[p + 'gate.e_score_correction_bias']).reshape(c['n_group'], -1)
        choice[np.argsort(-np.sort(choice, 1)[:, -2:].sum(1))[c['topk_group']:]] = -np.inf
        chosen = np.argsort(-choice.reshape(-1))[:c['num_experts_per_tok']]
        w = s[chosen] / (s[chosen].sum() + 1e-20) if c['norm_topk_prob'] else s[chosen]
        into = self.mul(p + 'fc1_latent_proj', u) if c.get('moe_latent_size') else u
        out = sum(wi * c['routed_scaling_factor'] * self.relu2(f'{p}experts.{e}.', into) for e, wi in zip(chosen, w))
        out = self.mul(p + 'fc2_latent_proj', out) if c.get('moe_latent_size') else out
        return out + self.relu2(p + 'shared_experts.', u)
    def norm(self, name, x):
        return rms(x, self.w[name + '.weight'], self.c['layer_norm_epsilon'])
    def trunk(self, x):
        for i, kind in enumerate(self.c['layers_block_type']):
            p = f'backbone.layers.{i}.'
            u, m = self.norm(p + 'norm', x), p + 'mixer.'
            past = lambda k, v: (self.past(i, 'keys', k), self.past(i, 'values', v))
            x = x + {'linear_attention': lambda: self.mamba(i, m, u), 'full_attention': lambda: self.attention(m, u, past), 'mlp': lambda: self.relu2(m, u), 'moe': lambda: self.experts(m, u)}[kind]()
        return self.norm('backbone.norm_f', x)
    def layer(self, e, hidden, position):
        p = 'mtp.layers.'
        x = self.mul(p + '0.eh_proj', np.concatenate([self.norm(p + '0.enorm', e), self.norm(p + '0.hnorm', hidden)]))
        x = x + self.attention(p + '0.mixer.', self.norm(p + '0.norm', x), lambda k, v: self.remember(position, k, v))
        second = self.relu2 if p + '1.mixer.up_proj.weight' in self.w else self.experts
        x = x + second(p + '1.mixer.', self.norm(p + '1.norm', x))
        return self.norm(p + '1.final_layernorm', x)

MODELS = dict(qwen3_next=Qwen, qwen3_5_text=Qwen, qwen3_5_moe_text=Qwen, nemotron_h=Nemotron)

def check(folder):
    c, ref = json.load(open(folder + '/config.json')), read(folder + '/reference.safetensors')
    for i in range(2):
        m = MODELS[c['model_type']](c, read(folder + '/model.safetensors'))
        got, want = np.array([m.step(t) for t in ref[f'prompt{i}.input_ids']]), ref[f'prompt{i}.logits']
        print(folder, i, 'logits', (np.abs(got - want) / (1 + np.abs(want))).max())

def qwen_shapes(c):
    d, v, i = c['hidden_size'], c['vocab_size'], c.get('intermediate_size')
    yield from [('model.embed_tokens.weight', (v, d)), ('lm_head.weight', (v, d)), ('model.norm.weight', (d,))]
    h, kv, hd = c['num_attention_heads'], c['num_key_value_heads'], c['head_dim']
    hk, hv, dk, dv = (c['linear_' + n] for n in ('num_key_heads', 'num_value_heads', 'key_head_dim', 'value_head_dim'))
    three = lambda p, i: [(p + 'gate_proj.weight', (i, d)), (p + 'up_proj.weight', (i, d)), (p + 'down_proj.weight', (d, i))]
    def layer(p, attends):
        yield from [(p + 'input_layernorm.weight', (d,)), (p + 'post_attention_layernorm.weight', (d,))]
        if attends:
            s = p + 'self_attn.'
            yield from [(s + 'q_proj.weight', (2 * h * hd, d)), (s + 'k_proj.weight', (kv * hd, d)), (s + 'v_proj.weight', (kv * hd, d)), (s + 'o_proj.weight', (d, h * hd)), (s + 'q_norm.weight', (hd,)), (s + 'k_norm.weight', (hd,))]
        else:
            s, qkv = p + 'linear_attn.', 2 * hk * dk + hv * dv
            yield from [(s + 'conv1d.weight', (qkv, 1, c['linear_conv_kernel_dim'])), (s + 'A_log', (hv,)), (s + 'dt_bias', (hv,)), (s + 'norm.weight', (dv,)), (s + 'out_proj.weight', (d, hv * dv))]
            if c['model_type'] == 'qwen3_next': yield from [(s + 'in_proj_qkvz.weight', (qkv + hv * dv, d)), (s + 'in_proj_ba.weight', (2 * hv, d))]
            else: yield from [(s + 'in_proj_qkv.weight', (qkv, d)), (s + 'in_proj_z.weight', (hv * dv, d)), (s + 'in_proj_b.weight', (hv, d)), (s + 'in_proj_a.weight', (hv, d))]
        m = p + 'mlp.'
        if 'num_experts' in c:
            yield from [(m + 'gate.weight', (c['num_experts'], d)), (m + 'shared_expert_gate.weight', (1, d)), *three(m + 'shared_expert.', c['shared_expert_intermediate_size'])]
            for e in range(c['num_experts']): yield from three(f'{m}experts.{e}.', c['moe_intermediate_size'])
        else: yield from three(m, i)
    for l, kind in enumerate(c['layer_types']): yield from layer(f'model.layers.{l}.', kind == 'full_attention')
    yield from [('mtp.fc.weight', (d, 2 * d)), ('mtp.pre_fc_norm_embedding.weight', (d,)), ('mtp.pre_fc_norm_hidden.weight', (d,)), ('mtp.norm.weight', (d,))]
    yield from layer('mtp.layers.0.', True)

def nemotron_shapes(c):
    d, v = c['hidden_size'], c['vocab_size']
    yield from [('backbone.embeddings.weight', (v, d)), ('lm_head.weight', (v, d)), ('backbone.norm_f.weight', (d,))]
    h, n, g = c['mamba_num_heads'], c['ssm_state_size'], c['n_groups']
    di, qh, kv, hd = h * c['mamba_head_dim'], c['num_attention_heads'], c['num_key_value_heads'], c['head_dim']
    two = lambda p, i, d: [(p + 'up_proj.weight', (i, d)), (p + 'down_proj.weight', (d, i))]
    def mixer(m, kind):
        if kind == 'linear_attention':
            yield from [(m + 'in_proj.weight', (2 * di + 2 * g * n + h, d)), (m + 'conv1d.weight', (di + 2 * g * n, 1, c['conv_kernel'])), (m + 'conv1d.bias', (di + 2 * g * n,)), (m + 'dt_bias', (h,)), (m + 'A_log', (h,)),
                        (m + 'D', (h,)), (m + 'norm.weight', (di,)), (m + 'out_proj.weight', (d, di))]
        elif kind == 'full_attention':
            yield from [(m + 'q_proj.weight', (qh * hd, d)), (m + 'k_proj.weight', (kv * hd, d)), (m + 'v_proj.weight', (kv * hd, d)), (m + 'o_proj.weight', (d, qh * hd))]
        elif kind == 'mlp':
            yield from two(m, c['intermediate_size'], d)
        else:
            lat = c['moe_latent_size']
            yield from [(m + 'gate.weight', (c['n_routed_experts'], d)), (m + 'gate.e_score_correction_bias', (c['n_routed_experts'],)), (m + 'fc1_latent_proj.weight', (lat, d)), (m + 'fc2_latent_proj.weight', (d, lat)),
                        *two(m + 'shared_experts.', c['moe_shared_expert_intermediate_size'], d)]
            for e in range(c['n_routed_experts']): yield from two(f'{m}experts.{e}.', c['moe_intermediate_size'], lat)
    for l, kind in enumerate(c['layers_block_type']):
        yield f'backbone.layers.{l}.norm.weight', (d,)
        yield from mixer(f'backbone.layers.{l}.mixer.', kind)
    yield from [('mtp.layers.0.' + x, (d,)) for x in ('enorm.weight', 'hnorm.weight', 'norm.weight')]
    yield from [('mtp.layers.0.eh_proj.weight', (d, 2 * d)), ('mtp.layers.1.norm.weight', (d,)), ('mtp.layers.1.final_layernorm.weight', (d,))]
    yield from mixer('mtp.layers.0.mixer.', 'full_attention')
    yield from mixer('mtp.layers.1.mixer.', c['mtp_layers_block_type'][1])

def value(name, shape, r, zero_centred):
    n, leaf = r.standard_normal(shape), name.split('.')[-1]
    if leaf == 'A_log': v = np.log(r.uniform(0.3, 8.0, shape))
    elif leaf == 'dt_bias': v = r.uniform(-4.0, 0.5, shape)
    elif leaf == 'D': v = 1 + 0.3 * n
    elif len(shape) == 1 and 'norm' in name: v = 0.1 * n + (not zero_centred or 'linear_attn' in name)
    elif len(shape) == 1: v = 0.1 * n
    elif 'embed' in name: v = n
    else: v = n * shape[-1] ** -0.5
    return bf16(v)

def make(out):
    common = dict(vocab_size=64, bos_token_id=1, eos_token_id=2, max_position_embeddings=2048, tie_word_embeddings=False, dtype='bfloat16', hidden_size=32)
    qwen = dict(num_hidden_layers=3, layer_types=['linear_attention', 'linear_attention', 'full_attention'], num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, hidden_act='silu',
                rope_parameters=dict(rope_type='default', rope_theta=10000.0, partial_rotary_factor=0.5), linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
                linear_conv_kernel_dim=4, **common)
    experts = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24, norm_topk_prob=True)
    nemotron = dict(model_type='nemotron_h', layers_block_type=['linear_attention', 'moe', 'full_attention', 'moe'], num_nextn_predict_layers=1, mtp_layers_block_type=['full_attention', 'moe'], num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2, conv_kernel=4, use_conv_bias=True, layer_norm_epsilon=1e-5, mlp_hidden_act='relu2',
                    n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, moe_shared_expert_intermediate_size=24, n_shared_experts=1, moe_latent_size=16, routed_scaling_factor=1.3, n_group=1, topk_group=1,
                    norm_topk_prob=True, **common)
    # As the demo model's: no experts, and an MLP in the head too.
    mlps = dict(model_type='nemotron_h', layers_block_type=['linear_attention', 'mlp', 'full_attention', 'mlp'], num_nextn_predict_layers=1, mtp_layers_block_type=['full_attention', 'mlp'], mtp_hybrid_override_pattern='*-',
                intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2, conv_kernel=4, use_conv_bias=True,
                layer_norm_epsilon=1e-5, mlp_hidden_act='relu2', **common)
    for name, c, shapes, seed in [('qwen3_5', dict(model_type='qwen3_5_text', intermediate_size=48, mtp_num_hidden_layers=1, **qwen), qwen_shapes, 5),
                                  ('qwen3_5_moe', dict(model_type='qwen3_5_moe_text', mtp_num_hidden_layers=1, **qwen, **experts), qwen_shapes, 6),
                                  ('qwen3_next', dict(model_type='qwen3_next', **qwen, **experts), qwen_shapes, 7), ('nemotron_h', nemotron, nemotron_shapes, 8),
                                  ('nemotron_h_mlp', mlps, nemotron_shapes, 9)]:
        r = np.random.default_rng(seed)
        weights = {k: value(k, s, r, c['model_type'] != 'nemotron_h') for k, s in shapes(c)}
        m, ids = MODELS[c['model_type']](c, weights), r.integers(3, c['vocab_size'], 72)
        logits, heads = [], []
        for at, t in enumerate(ids):
            # Positions count from 1: the first token has none before it.
            if at: heads.append(m.head(t, m.hidden, at)[0])
            logits.append(m.step(t))
        hidden, chain = m.hidden, []
        # Drafts of drafts, here of ids of no meaning.
        more = r.integers(3, c['vocab_size'], 7)
        for k, t in enumerate(more):
            draft, hidden = m.head(t, hidden, len(ids) + k)
            chain.append(draft)
        f32, i32 = lambda x: np.array(x, np.float32), lambda x: np.array(x, np.int32)
        os.makedirs(f'{out}/{name}', exist_ok=True)
        write(f'{out}/{name}/model.safetensors', weights, True)
        write(f'{out}/{name}/reference.safetensors', dict(ids=i32(ids), logits=f32(logits), heads=f32(heads), more=i32(more), chain=f32(chain)), False)
        json.dump(c, open(f'{out}/{name}/config.json', 'w'), indent=1)
        print(name, 'logits', np.std(logits), 'of the head', np.std(heads))

if __name__ == '__main__':
    if sys.argv[1] == 'check': check(sys.argv[2])
    else: make(sys.argv[2])
