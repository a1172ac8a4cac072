//! Which tensors and keys the files of each family have.

use std::path::Path;

use super::{
    convert::{Golden, open},
    writer::Writer,
};

/// The file of a reference model; `None` for a family that has no architecture in GGUF.
pub fn convert(folder: &Path) -> Option<Golden> {
    let (config, checkpoint) = open(folder);
    let experts = checkpoint.names().any(|n| n.contains("expert"));
    let granite_mamba = checkpoint.names().any(|n| n.contains("mamba"));
    let arch = match config["model_type"].as_str()? {
        "llama" => "llama",
        "qwen3" if config["use_sliding_window"] != true => "qwen3",
        "nemotron_h" if experts => "nemotron_h_moe",
        "nemotron_h" => "nemotron_h",
        "granitemoehybrid" if granite_mamba => "granitehybrid",
        "granitemoehybrid" => "granitemoe",
        "bamba" => "granitehybrid",
        "mamba" | "falcon_mamba" => "mamba",
        "mamba2" => "mamba2",
        "jamba" => "jamba",
        "falcon_h1" => "falcon-h1",
        "lfm2" => "lfm2",
        "lfm2_moe" => "lfm2moe",
        "qwen3_next" => "qwen3next",
        "qwen3_5_text" => "qwen35",
        "qwen3_5_moe_text" => "qwen35moe",
        _ => return None,
    };
    let mut g = Golden { config, checkpoint, out: Writer::new(arch), arch: arch.into() };
    g.key("context_length", 2048usize);
    g.key("vocab_size", g.n("vocab_size"));
    g.key("embedding_length", g.n("hidden_size"));
    let eps = ["rms_norm_eps", "norm_eps", "layer_norm_epsilon"].iter().find_map(|k| g.config[*k].as_f64()).unwrap();
    g.key("attention.layer_norm_rms_epsilon", eps);
    let layers = match arch {
        "nemotron_h" | "nemotron_h_moe" => g.config["layers_block_type"].as_array()?.len(),
        _ => g.n("num_hidden_layers"),
    };
    g.key("block_count", layers);
    match arch {
        "llama" | "qwen3" => transformer(&mut g, layers),
        "nemotron_h" | "nemotron_h_moe" => nemotron_h(&mut g, layers),
        "granitehybrid" | "granitemoe" => granite(&mut g, layers),
        "mamba" | "mamba2" => mamba(&mut g, layers),
        "jamba" => jamba(&mut g, layers),
        "falcon-h1" => falcon_h1(&mut g, layers),
        "lfm2" | "lfm2moe" => lfm2(&mut g, layers),
        _ => qwen_next(&mut g, layers),
    }
    if !g.out.tensors.contains_key("token_embd.weight") {
        let name = ["model.embed_tokens.weight", "backbone.embeddings.weight"].into_iter().find(|n| g.has(n))?;
        g.copy(name, "token_embd.weight");
    }
    if !g.out.tensors.contains_key("output.weight") && g.has("lm_head.weight") && !g.flag("tie_word_embeddings") {
        g.copy("lm_head.weight", "output.weight");
    }
    Some(g)
}

fn types(g: &Golden, key: &str) -> Vec<String> {
    g.config[key].as_array().unwrap().iter().map(|t| t.as_str().unwrap().to_owned()).collect()
}

fn transformer(g: &mut Golden, layers: usize) {
    g.heads(None, layers);
    let hd = g.config["head_dim"].as_u64().map_or(g.n("hidden_size") / g.n("num_attention_heads"), |n| n as usize);
    g.rope(hd);
    g.key("feed_forward_length", g.n("intermediate_size"));
    if g.config["rope_parameters"]["rope_type"] == "llama3" {
        let r = g.config["rope_parameters"].clone();
        let x = |key: &str| r[key].as_f64().unwrap();
        let (factor, low, high, old) =
            (x("factor"), x("low_freq_factor"), x("high_freq_factor"), x("original_max_position_embeddings"));
        // As the converter does it.
        let factor_of = |i: usize| {
            let wavelength = std::f64::consts::TAU * x("rope_theta").powf(2.0 * i as f64 / hd as f64);
            if wavelength < old / high {
                1.0
            } else if wavelength > old / low {
                factor
            } else {
                let smooth = (old / wavelength - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        let factors: Vec<f32> = (0..hd / 2).map(|i| factor_of(i) as f32).collect();
        g.out.f32("rope_freqs.weight", &[hd / 2], &factors);
    }
    for i in 0..layers {
        let (p, b) = (format!("model.layers.{i}."), format!("blk.{i}."));
        let permuted = g.arch == "llama";
        g.attention(&format!("{p}self_attn."), &b, permuted, "o_proj");
        g.copies(&format!("{p}self_attn."), &b, &[("q_norm", "attn_q_norm"), ("k_norm", "attn_k_norm")]);
        g.copies(&p, &b, &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")]);
        g.mlp(&format!("{p}mlp."), &b);
    }
    g.copy("model.norm.weight", "output_norm.weight");
}

fn nemotron_h(g: &mut Golden, layers: usize) {
    let kinds = types(g, "layers_block_type");
    let moe = g.arch == "nemotron_h_moe";
    let width = |kind: &str| match kind {
        "moe" => g.n("moe_intermediate_size"),
        "mlp" => g.n("intermediate_size"),
        _ => 0,
    };
    let widths: Vec<usize> = kinds.iter().map(|k| width(k)).collect();
    g.key("feed_forward_length", widths);
    g.heads(Some(&|i| kinds[i] == "full_attention"), layers);
    let heads = g.n("mamba_num_heads");
    g.key("ssm.conv_kernel", g.n("conv_kernel"));
    g.key("ssm.state_size", g.n("ssm_state_size"));
    g.key("ssm.group_count", g.n("n_groups"));
    g.key("ssm.inner_size", heads * g.n("mamba_head_dim"));
    g.key("ssm.time_step_rank", heads);
    if moe {
        g.key("expert_count", g.n("n_routed_experts"));
        g.key("expert_used_count", g.n("num_experts_per_tok"));
        g.key("expert_feed_forward_length", g.n("moe_intermediate_size"));
        g.key("expert_shared_feed_forward_length", g.n("moe_shared_expert_intermediate_size"));
        g.key("expert_weights_norm", g.flag("norm_topk_prob"));
        g.key("expert_weights_scale", g.x("routed_scaling_factor"));
        g.key("expert_group_count", g.n("n_group"));
        g.key("expert_group_used_count", g.n("topk_group"));
        if let Some(latent) = g.config["moe_latent_size"].as_u64() {
            g.key("moe_latent_size", latent as usize);
        }
    }
    for (i, kind) in kinds.iter().enumerate() {
        let (p, b) = (format!("backbone.layers.{i}.mixer."), format!("blk.{i}."));
        g.copies(&format!("backbone.layers.{i}."), &b, &[("norm", "attn_norm")]);
        match kind.as_str() {
            "linear_attention" => g.mamba2(&p, &b, g.n("n_groups")),
            "full_attention" => g.attention(&p, &b, true, "o_proj"),
            "mlp" => g.copies(&p, &b, &[("up_proj", "ffn_up"), ("down_proj", "ffn_down")]),
            _ => {
                g.copies(&p, &b, &[("gate", "ffn_gate_inp")]);
                g.copy(&format!("{p}gate.e_score_correction_bias"), &format!("{b}exp_probs_b.bias"));
                g.stack(&format!("{p}experts."), &[("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")], &b);
                let shared = [("up_proj", "ffn_up_shexp"), ("down_proj", "ffn_down_shexp")];
                g.copies(&format!("{p}shared_experts."), &b, &shared);
                g.copies(&p, &b, &[("fc1_latent_proj", "ffn_latent_down"), ("fc2_latent_proj", "ffn_latent_up")]);
            }
        }
    }
    g.copy("backbone.norm_f.weight", "output_norm.weight");
}

fn granite(g: &mut Golden, layers: usize) {
    let bamba = g.config["model_type"] == "bamba";
    let attends = |i: usize| match bamba {
        true => g.config["attn_layer_indices"].as_array().unwrap().iter().any(|l| l == i),
        false => g.config["layer_types"][i] == "full_attention",
    };
    let attending: Vec<bool> = (0..layers).map(attends).collect();
    g.heads(Some(&|i| attending[i]), layers);
    let hd = g.n("hidden_size") / g.n("num_attention_heads");
    let rope = bamba || g.config["position_embedding_type"] == "rope";
    g.key("rope.scaling.finetuned", rope);
    if rope {
        g.rope(hd);
    }
    if !bamba {
        g.key("attention.scale", g.x("attention_multiplier"));
        g.key("embedding_scale", g.x("embedding_multiplier"));
        g.key("residual_scale", g.x("residual_multiplier"));
        g.key("logit_scale", g.x("logits_scaling"));
    }
    let experts = g.config["num_local_experts"].as_u64().unwrap_or(0) as usize;
    let inner = g.n("intermediate_size");
    let shared = if bamba { inner } else { g.n("shared_intermediate_size") };
    g.key("feed_forward_length", if experts > 0 { inner } else { shared });
    if experts > 0 {
        g.key("expert_count", experts);
        g.key("expert_used_count", g.n("num_experts_per_tok"));
        g.key("expert_shared_feed_forward_length", shared);
    }
    if attending.iter().any(|a| !a) {
        g.key("ssm.conv_kernel", g.n("mamba_d_conv"));
        g.key("ssm.state_size", g.n("mamba_d_state"));
        g.key("ssm.group_count", g.n("mamba_n_groups"));
        g.key("ssm.inner_size", g.n("mamba_expand") * g.n("hidden_size"));
        g.key("ssm.time_step_rank", g.n("mamba_n_heads"));
    }
    for (i, attends) in attending.into_iter().enumerate() {
        let (p, b) = (format!("model.layers.{i}."), format!("blk.{i}."));
        let norms = [
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("pre_ff_layernorm", "ffn_norm"),
        ];
        g.copies(&p, &b, &norms);
        match attends {
            true => g.attention(&format!("{p}self_attn."), &b, true, "o_proj"),
            false => g.mamba2(&format!("{p}mamba."), &b, g.n("mamba_n_groups")),
        }
        if bamba {
            g.mlp(&format!("{p}feed_forward."), &b);
            continue;
        }
        if experts > 0 {
            let both = g.get(&format!("{p}block_sparse_moe.input_linear.weight"));
            g.put(format!("{b}ffn_gate_exps.weight"), &both.of_each(0, inner));
            g.put(format!("{b}ffn_up_exps.weight"), &both.of_each(inner, 2 * inner));
            let moe = [("output_linear", "ffn_down_exps"), ("router.layer", "ffn_gate_inp")];
            g.copies(&format!("{p}block_sparse_moe."), &b, &moe);
        }
        let suffix = if experts > 0 { "_shexp" } else { "" };
        let both = g.get(&format!("{p}shared_mlp.input_linear.weight"));
        g.put(format!("{b}ffn_gate{suffix}.weight"), &both.take(0..shared));
        g.put(format!("{b}ffn_up{suffix}.weight"), &both.take(shared..2 * shared));
        g.copy(&format!("{p}shared_mlp.output_linear.weight"), &format!("{b}ffn_down{suffix}.weight"));
    }
    let norm = if bamba { "model.final_layernorm.weight" } else { "model.norm.weight" };
    g.copy(norm, "output_norm.weight");
}

fn mamba(g: &mut Golden, layers: usize) {
    g.key("feed_forward_length", 0usize);
    g.key("attention.head_count", 0usize);
    g.key("ssm.conv_kernel", g.n("conv_kernel"));
    g.key("ssm.inner_size", g.n("expand") * g.n("hidden_size"));
    g.key("ssm.state_size", g.n("state_size"));
    let two = g.arch == "mamba2";
    match two {
        true => {
            g.key("ssm.time_step_rank", g.n("num_heads"));
            g.key("ssm.group_count", g.n("n_groups"));
        }
        false => {
            g.key("ssm.time_step_rank", g.n("time_step_rank"));
            g.key("ssm.dt_b_c_rms", g.config["model_type"] == "falcon_mamba");
        }
    }
    for i in 0..layers {
        let (p, b) = (format!("backbone.layers.{i}."), format!("blk.{i}."));
        g.copies(&p, &b, &[("norm", "attn_norm")]);
        match two {
            true => g.mamba2(&format!("{p}mixer."), &b, g.n("n_groups")),
            false => g.mamba1(&format!("{p}mixer."), &b),
        }
    }
    g.copy("backbone.norm_f.weight", "output_norm.weight");
}

fn jamba(g: &mut Golden, layers: usize) {
    let attending: Vec<bool> =
        (0..layers).map(|i| g.has(&format!("model.layers.{i}.self_attn.q_proj.weight"))).collect();
    g.heads(Some(&|i| attending[i]), layers);
    g.key("feed_forward_length", g.n("intermediate_size"));
    g.key("ssm.conv_kernel", g.n("mamba_d_conv"));
    g.key("ssm.inner_size", g.n("mamba_expand") * g.n("hidden_size"));
    g.key("ssm.state_size", g.n("mamba_d_state"));
    g.key("ssm.time_step_rank", g.n("mamba_dt_rank"));
    g.key("expert_count", g.n("num_experts"));
    g.key("expert_used_count", g.n("num_experts_per_tok"));
    for (i, attends) in attending.into_iter().enumerate() {
        let (p, b) = (format!("model.layers.{i}."), format!("blk.{i}."));
        g.copies(&p, &b, &[("input_layernorm", "attn_norm"), ("pre_ff_layernorm", "ffn_norm")]);
        match attends {
            true => g.attention(&format!("{p}self_attn."), &b, false, "o_proj"),
            false => {
                g.mamba1(&format!("{p}mamba."), &b);
                let norms =
                    [("dt_layernorm", "ssm_dt_norm"), ("b_layernorm", "ssm_b_norm"), ("c_layernorm", "ssm_c_norm")];
                g.copies(&format!("{p}mamba."), &b, &norms);
            }
        }
        let f = format!("{p}feed_forward.");
        if g.has(&format!("{f}router.weight")) {
            g.copies(&f, &b, &[("router", "ffn_gate_inp")]);
            let pairs = [("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")];
            g.stack(&format!("{f}experts."), &pairs, &b);
        } else {
            g.mlp(&f, &b);
        }
    }
    g.copy("model.final_layernorm.weight", "output_norm.weight");
}

fn falcon_h1(g: &mut Golden, layers: usize) {
    g.heads(None, layers);
    g.rope(g.n("head_dim"));
    let (inner, groups) = (g.n("mamba_d_ssm"), g.n("mamba_n_groups"));
    let bc = groups * g.n("mamba_d_state");
    g.key("feed_forward_length", g.n("intermediate_size"));
    g.key("ssm.conv_kernel", g.n("mamba_d_conv"));
    g.key("ssm.inner_size", inner);
    g.key("ssm.state_size", g.n("mamba_d_state"));
    g.key("ssm.time_step_rank", g.n("mamba_n_heads"));
    g.key("ssm.group_count", groups);
    let list = |g: &Golden, key: &str| -> Vec<f32> {
        g.config[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
    };
    let (ssm, mlp) = (list(g, "ssm_multipliers"), list(g, "mlp_multipliers"));
    let x = |g: &Golden, key: &str| g.x(key) as f32;
    for i in 0..layers {
        let (p, b) = (format!("model.layers.{i}."), format!("blk.{i}."));
        g.copies(&p, &b, &[("input_layernorm", "attn_norm")]);
        g.copy(&format!("{p}pre_ff_layernorm.weight"), &format!("{b}ffn_norm"));
        g.mamba2(&format!("{p}mamba."), &b, groups);
        let input = g.get(&format!("{p}mamba.in_proj.weight"));
        let (row, rest) = (input.row(), input.shape[0] - 2 * inner - 2 * bc);
        let mut scaled = input.map(|v| v * x(g, "ssm_in_multiplier"));
        let mut at = 0;
        for (n, m) in [inner, inner, bc, bc, rest].into_iter().zip(&ssm) {
            scaled.values[at * row..(at + n) * row].iter_mut().for_each(|v| *v *= m);
            at += n;
        }
        g.put(format!("{b}ssm_in.weight"), &scaled);
        let out = g.get(&format!("{p}mamba.out_proj.weight")).map(|v| v * x(g, "ssm_out_multiplier"));
        g.put(format!("{b}ssm_out.weight"), &out);
        let ai = x(g, "attention_in_multiplier");
        for (from, to, m) in [
            ("q_proj", "attn_q", ai),
            ("k_proj", "attn_k", ai * x(g, "key_multiplier")),
            ("v_proj", "attn_v", ai),
            ("o_proj", "attn_output", x(g, "attention_out_multiplier")),
        ] {
            let a = g.get(&format!("{p}self_attn.{from}.weight")).map(|v| v * m);
            g.put(format!("{b}{to}.weight"), &a);
        }
        for (from, to, m) in
            [("gate_proj", "ffn_gate", mlp[0]), ("up_proj", "ffn_up", 1.0), ("down_proj", "ffn_down", mlp[1])]
        {
            let a = g.get(&format!("{p}feed_forward.{from}.weight")).map(|v| v * m);
            g.put(format!("{b}{to}.weight"), &a);
        }
    }
    let embedding = g.get("model.embed_tokens.weight").map(|v| v * x(g, "embedding_multiplier"));
    g.put("token_embd.weight", &embedding);
    let head = g.get("lm_head.weight").map(|v| v * x(g, "lm_head_multiplier"));
    g.put("output.weight", &head);
    g.copy("model.final_layernorm.weight", "output_norm.weight");
}

fn lfm2(g: &mut Golden, layers: usize) {
    let kinds = types(g, "layer_types");
    g.heads(Some(&|i| kinds[i] == "full_attention"), layers);
    g.rope(g.n("hidden_size") / g.n("num_attention_heads"));
    let width = g.get("model.layers.0.feed_forward.w1.weight").shape[0];
    g.key("feed_forward_length", width);
    g.key("shortconv.l_cache", g.n("conv_L_cache"));
    if g.arch == "lfm2moe" {
        g.key("expert_count", g.n("num_experts"));
        g.key("expert_used_count", g.n("num_experts_per_tok"));
        g.key("expert_feed_forward_length", g.n("moe_intermediate_size"));
        g.key("leading_dense_block_count", g.n("num_dense_layers"));
        g.key("expert_gating_func", 2usize);
    }
    for (i, kind) in kinds.iter().enumerate() {
        let (p, b) = (format!("model.layers.{i}."), format!("blk.{i}."));
        g.copies(&p, &b, &[("operator_norm", "attn_norm"), ("ffn_norm", "ffn_norm")]);
        if kind == "full_attention" {
            g.attention(&format!("{p}self_attn."), &b, false, "out_proj");
            let norms = [("q_layernorm", "attn_q_norm"), ("k_layernorm", "attn_k_norm")];
            g.copies(&format!("{p}self_attn."), &b, &norms);
        } else {
            let conv = g.get(&format!("{p}conv.conv.weight"));
            let (c, k) = (conv.shape[0], conv.shape[2]);
            g.put(format!("{b}shortconv.conv.weight"), &conv.reshape(&[c, k]));
            let pairs = [("in_proj", "shortconv.in_proj"), ("out_proj", "shortconv.out_proj")];
            g.copies(&format!("{p}conv."), &b, &pairs);
        }
        let f = format!("{p}feed_forward.");
        if g.has(&format!("{f}gate.weight")) {
            g.copies(&f, &b, &[("gate", "ffn_gate_inp")]);
            g.copy(&format!("{f}expert_bias"), &format!("{b}exp_probs_b.bias"));
            let pairs = [("w1", "ffn_gate_exps"), ("w3", "ffn_up_exps"), ("w2", "ffn_down_exps")];
            g.stack(&format!("{f}experts."), &pairs, &b);
        } else {
            g.copies(&f, &b, &[("w1", "ffn_gate"), ("w3", "ffn_up"), ("w2", "ffn_down")]);
        }
    }
    g.copy("model.embedding_norm.weight", "token_embd_norm.weight");
}

fn qwen_next(g: &mut Golden, layers: usize) {
    let kinds = types(g, "layer_types");
    g.heads(None, layers);
    g.rope(g.n("head_dim"));
    let (hk, hv) = (g.n("linear_num_key_heads"), g.n("linear_num_value_heads"));
    let (dk, dv) = (g.n("linear_key_head_dim"), g.n("linear_value_head_dim"));
    let (r, next) = (hv / hk, g.arch == "qwen3next");
    g.key("ssm.conv_kernel", g.n("linear_conv_kernel_dim"));
    g.key("ssm.state_size", dk);
    g.key("ssm.group_count", hk);
    g.key("ssm.time_step_rank", hv);
    g.key("ssm.inner_size", hv * dv);
    g.key("full_attention_interval", 4usize);
    g.key("feed_forward_length", g.config["intermediate_size"].as_u64().unwrap_or(32) as usize);
    if g.arch != "qwen35" {
        g.key("expert_count", g.n("num_experts"));
        g.key("expert_used_count", g.n("num_experts_per_tok"));
        g.key("expert_feed_forward_length", g.n("moe_intermediate_size"));
        g.key("expert_shared_feed_forward_length", g.n("shared_expert_intermediate_size"));
    }
    // Value heads of all key heads in turn, entries of `width` rows.
    let tiled = |width: usize| {
        (0..hv * width).map(move |row| {
            let (p, i) = (row / width, row % width);
            let head = if next { p } else { p % hk * r + p / hk };
            head * width + i
        })
    };
    let keys = 2 * hk * dk;
    for (i, kind) in kinds.iter().enumerate() {
        let (p, b) = (format!("model.layers.{i}."), format!("blk.{i}."));
        let plus_one = |g: &mut Golden, from: &str, to: &str| {
            let a = g.get(&format!("{p}{from}.weight")).map(|x| x + 1.0);
            g.put(format!("{b}{to}.weight"), &a);
        };
        plus_one(g, "input_layernorm", "attn_norm");
        plus_one(g, "post_attention_layernorm", "post_attention_norm");
        if kind == "full_attention" {
            g.attention(&format!("{p}self_attn."), &b, false, "o_proj");
            plus_one(g, "self_attn.q_norm", "attn_q_norm");
            plus_one(g, "self_attn.k_norm", "attn_k_norm");
        } else {
            let a = format!("{p}linear_attn.");
            if next {
                let all = g.get(&format!("{a}in_proj_qkvz.weight"));
                let group = 2 * dk + 2 * r * dv;
                let rows = |from: usize, n: usize| (0..hk).flat_map(move |k| (0..n).map(move |j| k * group + from + j));
                let (q, k) = (all.take(rows(0, dk)), all.take(rows(dk, dk)));
                let (v, z) = (all.take(rows(2 * dk, r * dv)), all.take(rows(2 * dk + r * dv, r * dv)));
                g.put(format!("{b}attn_qkv.weight"), &q.followed_by(&k).followed_by(&v));
                g.put(format!("{b}attn_gate.weight"), &z);
                g.copies(&a, &b, &[("in_proj_ba", "ssm_ba")]);
            } else {
                let all = g.get(&format!("{a}in_proj_qkv.weight"));
                g.put(format!("{b}attn_qkv.weight"), &all.take((0..keys).chain(tiled(dv).map(|v| keys + v))));
                let z = g.get(&format!("{a}in_proj_z.weight")).take(tiled(dv));
                g.put(format!("{b}attn_gate.weight"), &z);
                for (from, to) in [("in_proj_b", "ssm_beta"), ("in_proj_a", "ssm_alpha")] {
                    let rows = g.get(&format!("{a}{from}.weight")).take(tiled(1));
                    g.put(format!("{b}{to}.weight"), &rows);
                }
            }
            let conv = g.get(&format!("{a}conv1d.weight"));
            let (c, k) = (conv.shape[0], conv.shape[2]);
            let conv = conv.take((0..keys).chain(tiled(dv).map(|v| keys + v))).reshape(&[c, k]);
            g.put(format!("{b}ssm_conv1d.weight"), &conv);
            let a_log = g.get(&format!("{a}A_log")).map(|x| -x.exp()).take(tiled(1));
            g.put(format!("{b}ssm_a"), &a_log);
            let dt = g.get(&format!("{a}dt_bias")).take(tiled(1));
            g.put(format!("{b}ssm_dt.bias"), &dt);
            g.copies(&a, &b, &[("norm", "ssm_norm")]);
            let out = g.get(&format!("{a}out_proj.weight")).transposed().take(tiled(dv)).transposed();
            g.put(format!("{b}ssm_out.weight"), &out);
        }
        let f = format!("{p}mlp.");
        if g.has(&format!("{f}gate.weight")) {
            g.copies(&f, &b, &[("gate", "ffn_gate_inp")]);
            let gate = g.get(&format!("{f}shared_expert_gate.weight"));
            let width = gate.values.len();
            g.put(format!("{b}ffn_gate_inp_shexp.weight"), &gate.reshape(&[width]));
            let pairs = [("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")];
            g.stack(&format!("{f}experts."), &pairs, &b);
            let shared =
                [("gate_proj", "ffn_gate_shexp"), ("up_proj", "ffn_up_shexp"), ("down_proj", "ffn_down_shexp")];
            g.copies(&format!("{f}shared_expert."), &b, &shared);
        } else {
            g.mlp(&f, &b);
        }
    }
    let norm = g.get("model.norm.weight").map(|x| x + 1.0);
    g.put("output_norm.weight", &norm);
}
