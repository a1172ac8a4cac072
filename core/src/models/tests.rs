use super::*;
use crate::{backend::Caps, blocks::Plan, engine::pools, tensor::DType};

fn root(path: &str) -> String {
    format!("{}/../{path}", env!("CARGO_MANIFEST_DIR"))
}

fn config(path: &str) -> Config {
    Config::parse(path, &std::fs::read(root(path)).unwrap()).unwrap()
}

fn parse(text: &str) -> Result<Architecture> {
    read(&Config::parse("config.json", text.as_bytes()).unwrap())
}

/// Dtypes of a GPU with bf16.
fn caps() -> Caps {
    Caps {
        backend: "none",
        device: String::new(),
        memory: None,
        act: DType::Bf16,
        products: DType::Bf16,
        int8: crate::backend::Int8::Never,
        rounds: true,
        kv: DType::Bf16,
        conv: DType::Bf16,
        state: DType::F32,
        max_binding: u64::MAX,
        asynchronous: false,
        ranks: 1,
    }
}

#[test]
fn parameters_of_the_references_are_counted_exactly() {
    for name in [
        "nemotron_h",
        "nemotron_h_moe",
        "mamba2",
        "granitemoehybrid",
        "granitemoehybrid_dense",
        "qwen3_next",
        "llama",
        "qwen3",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "jamba",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "olmo_hybrid",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "zamba2",
        "kimi_linear",
        "zamba2_blocks",
        "kimi_linear_groups",
    ] {
        let spec = spec(&config(&format!("tests/golden/{name}/config.json"))).unwrap();
        let reference = std::fs::read(root(&format!("tests/golden/{name}/reference.json"))).unwrap();
        let reference: serde_json::Value = serde_json::from_slice(&reference).unwrap();
        assert_eq!(spec.parameters, reference["params"].as_u64().unwrap(), "{name}");
        assert_eq!((spec.vocab, spec.eos.as_slice()), (320, [2].as_slice()), "{name}");
    }
}

#[test]
fn more_parameters_than_can_be_counted_name_a_key() {
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(root("tests/golden/qwen3_next/config.json")).unwrap()).unwrap();
    for key in ["num_experts", "moe_intermediate_size"] {
        config[key] = (1 << 24).into();
    }
    let message = parse(&config.to_string()).unwrap_err().to_string();
    assert!(message.starts_with("config.json: key `hidden_size` or `d_model`: with the layers"), "{message}");
}

#[test]
fn published_models_have_their_published_sizes() {
    // Layers by letter, bytes of a slot and of a token's keys and values, parameters in billions.
    for (name, counts, slot, token, billions) in [
        ("nemotron-h-8b", "M24 -24 *4", 102_137_856, 16_384, 8.1),
        ("nemotron-nano-9b-v2", "M27 -25 *4", 143_548_416, 16_384, 8.9),
        ("nemotron-3-nano-30b-a3b", "M23 E23 *6", 49_082_368, 6_144, 31.6),
        ("qwen3-next-80b-a3b", "G36 *12 E48", 77_266_944, 24_576, 79.7),
        ("granite-4.0-h-350m", "M28 *4 -32", 22_321_152, 4_096, 0.34),
        ("granite-4.0-h-1b", "M36 *4 -40", 57_341_952, 8_192, 1.46),
        ("mamba2-780m", "M48", 76_455_936, 0, 0.78),
        ("mamba2-2.7b", "M64", 169_836_544, 0, 2.7),
        ("zamba2-7b", "M81 *13 -13 L13", 152_243_712, 372_736, 7.357),
        ("kimi-linear-48b-a3b", "K20 *7 -1 E26", 43_417_600, 8_064, 49.1),
        // Cut to what fits into 141 GB.
        ("qwen3-next-80b-a3b-36-layers", "G27 *9 E36", 57_950_208, 18_432, 59.9),
    ] {
        let spec = spec(&config(&format!("models/configs/{name}.json"))).unwrap();
        for count in counts.split(' ') {
            let letter = count.chars().next().unwrap();
            let found = spec.layer_map.chars().filter(|l| *l == letter).count();
            assert_eq!(count[1..].parse(), Ok(found), "{name}: {letter} in {}", spec.layer_map);
        }
        assert_eq!(pools::slot_bytes(&spec, &caps()), slot, "{name}");
        assert_eq!(pools::page_bytes(&spec, &caps()), 64 * token, "{name}");
        let found = spec.parameters as f64 / 1e9;
        assert!((found / billions - 1.0).abs() < 0.02, "{name}: {found} billion parameters");
    }
}

#[test]
fn layer_map_names_token_mixers_and_channel_mixers() {
    let map = |name: &str| spec(&config(&format!("tests/golden/{name}/config.json"))).unwrap().layer_map;
    assert_eq!(map("nemotron_h"), "M-M*-M-M*-");
    assert_eq!(map("nemotron_h_moe"), "MEM*EME");
    assert_eq!(map("granitemoehybrid"), "MEME*EME");
    assert_eq!(map("granitemoehybrid_dense"), "M-*-M-M-");
    assert_eq!(map("qwen3_next"), "GEGEGE*E");
    assert_eq!(map("mamba2"), "MMM");
    assert_eq!(map("bamba"), "M-M-*-M-");
    assert_eq!(map("jamba"), "S-SE*-SE");
    assert_eq!(map("lfm2_moe"), "C-C-*ECE*E");
    assert_eq!(map("falcon_h1"), "M-M-M-");
    assert_eq!(map("olmo_hybrid"), "G-G-G-*-");
    assert_eq!(map("qwen3_5_moe_text"), "GEGEGE*E");
    assert_eq!(map("zamba2"), "M*-LMM*-LMM");
    assert_eq!(map("kimi_linear"), "K-KEKE*E");
}

#[test]
fn unknown_types_and_impossible_values_are_errors_that_name_the_key() {
    let nemotron = r#""model_type": "nemotron_h", "vocab_size": 320, "hidden_size": 64, "num_attention_heads": 4"#;
    let qwen = r#""model_type": "qwen3_next", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 4"#;
    let family = |name: &str, more: &str| {
        format!(
            r#"{{"model_type": "{name}", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2,
            "num_hidden_layers": 4, "mamba_n_heads": 4, {more}, "intermediate_size": 8}}"#
        )
    };
    for (text, expected) in [
        (r#"{"model_type": "gpt5"}"#.into(), "the supported types are nemotron_h, mamba2, "),
        (format!("{{{nemotron}}}"), "`hybrid_override_pattern` is missing"),
        (format!(r#"{{{nemotron}, "hybrid_override_pattern": "MX"}}"#), "unknown layer 'X'"),
        (
            format!(r#"{{{nemotron}, "hybrid_override_pattern": ""}}"#),
            "`hybrid_override_pattern`: 0 layers; 1 to 10000",
        ),
        (format!(r#"{{{nemotron}, "layers_block_type": []}}"#), "`layers_block_type` or `layer_types`: 0 layers"),
        (
            format!(r#"{{{nemotron}, "hybrid_override_pattern": "M", "mamba_hidden_act": "gelu"}}"#),
            "\"gelu\" is not supported, only \"silu\"",
        ),
        (format!(r#"{{{nemotron}, "layers_block_type": ["conv"]}}"#), "Conv is not a layer of this family"),
        (
            format!(r#"{{{nemotron}, "hybrid_override_pattern": "M", "n_groups": 7}}"#),
            "128 is not a multiple of `n_groups`",
        ),
        (format!(r#"{{{nemotron}, "hybrid_override_pattern": "M", "conv_kernel": 1}}"#), "2 to 8 are supported"),
        (format!(r#"{{{nemotron}, "hybrid_override_pattern": "*", "head_dim": 7}}"#), "head dim 7 is odd"),
        (
            format!(
                r#"{{{nemotron}, "hybrid_override_pattern": "E", "n_routed_experts": 8, "num_experts_per_tok": 9,
                "moe_intermediate_size": 8}}"#
            ),
            "at most 8 are possible",
        ),
        (format!(r#"{{{qwen}, "layer_types": ["full_attention"]}}"#), "1 entries for 4 layers"),
        (format!(r#"{{{qwen}, "linear_num_key_heads": 3}}"#), "`linear_num_value_heads`: 32 is not a multiple"),
        (r#"{"ssm_cfg": {"layer": "Mamba1"}, "vocab_size": 8, "d_model": 8}"#.into(), "only Mamba2"),
        (format!(r#"{{{qwen}, "attn_output_gate": false}}"#), "`attn_output_gate`: false is not supported"),
        (format!(r#"{{{qwen}, "output_gate_type": "sigmoid"}}"#), "`output_gate_type`: \"sigmoid\""),
        (family("bamba", r#""attn_layer_indices": [4]"#), "`attn_layer_indices`: layer 4 of 4"),
        (family("bamba", r#""mamba_d_head": "wide""#), "neither a number nor \"auto\""),
        (family("jamba", r#""attn_layer_offset": 8"#), "`attn_layer_offset`: 8 is not less than"),
        (family("jamba", r#""mamba_inner_layernorms": false"#), "`mamba_inner_layernorms`: false"),
        (family("jamba", r#""sliding_window": 1024"#), "`sliding_window`: 1024 is not supported"),
        (family("lfm2", r#""conv_dim": 16"#), "`conv_dim`: 16 is not supported, only the width"),
        (family("lfm2", r#""block_use_swiglu": false"#), "`block_use_swiglu`: false"),
        (
            family("lfm2", r#""layer_types": ["conv", "mamba", "conv", "conv"]"#),
            "Recurrent is not a layer of this family",
        ),
        (family("mamba", r#""expand": 3"#), "8 is not `expand` times the width, 24"),
        (family("falcon_h1", r#""ssm_multipliers": [1, 2]"#), "`ssm_multipliers`: 2 multipliers; there are 5"),
        (family("falcon_h1", r#""mamba_d_ssm": 48, "mamba_d_head": 10"#), "are not `mamba_d_ssm`, 48"),
        (family("olmo_hybrid", r#""linear_num_key_heads": 3"#), "`linear_num_value_heads`: 2 is not a multiple"),
        (family("qwen3_5_moe_text", r#""hidden_act": "gelu""#), "\"gelu\" is not supported"),
        (family("kimi_linear", r#""hidden_act": "situ""#), "`hidden_act`: activation \"situ\" is not supported"),
        (family("kimi_linear", r#""mla_use_nope": false"#), "`mla_use_nope`: false is not supported"),
        (family("kimi_linear", r#""mla_use_output_gate": true"#), "`mla_use_output_gate`: true is not supported"),
        (family("kimi_linear", r#""attention_bias": true"#), "`attention_bias`: true is not supported"),
        (family("kimi_linear", r#""moe_layer_freq": 2"#), "`moe_layer_freq`: 2 is not supported"),
        (family("kimi_linear", r#""num_key_value_heads": 1"#), "`num_key_value_heads`: 1 is not supported"),
        (
            family("kimi_linear", r#""linear_attn_config": {"gate_lower_bound": -5.0}"#),
            "`linear_attn_config.gate_lower_bound`: -5.0 is not supported",
        ),
        (
            family("kimi_linear", r#""linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]}"#),
            "`linear_attn_config.full_attn_layers`: layer 3, counted from 1",
        ),
        (family("kimi_linear", r#""mlp_layer_types": ["dense"]"#), "`mlp_layer_types`: 1 entries for 4 layers"),
        (family("kimi_linear", r#""num_expert_group": 3"#), "256 is not a multiple of `num_expert_group`"),
        (family("zamba2", r#""hidden_act": "tanh""#), "activation \"tanh\" is not supported"),
        (family("zamba2", r#""attention_head_dim": 4"#), "4 is not supported, only 8"),
        (family("zamba2", r#""attention_hidden_size": 8"#), "`attention_hidden_size`: 8 is not supported, only 16"),
        (family("zamba2", r#""mamba_headdim": 4"#), "`mamba_headdim`: 4 is not supported, only 2"),
        (family("zamba2", r#""hybrid_layer_ids": [1, 4]"#), "`hybrid_layer_ids`: layer 4 of 4"),
        (family("zamba2", r#""layer_types": ["mamba", "moe", "mamba", "mamba"]"#), "Moe is not a layer of this family"),
        (family("zamba2", r#""mamba_d_state": 8"#), "`layers_block_type` or `layer_types`"),
    ] {
        let message = parse(&text).unwrap_err().to_string();
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn what_a_configuration_leaves_out_is_as_its_family_has_it() {
    let qwen = r#"{"model_type": "qwen3_next", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}"#;
    let nemotron = r#"{"model_type": "nemotron_h", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 4,
        "hybrid_override_pattern": "*"}"#;
    let attention = |text: &str| {
        let a = parse(text).unwrap();
        let branches = a.layers.into_iter().flatten().flat_map(|step| step.branches);
        let plans = branches.filter_map(|b| if let Plan::Attention(plan) = b.plan { Some(plan) } else { None });
        let plan = plans.max_by_key(|p| p.heads.heads).expect("an attention layer");
        (plan.heads.head_dim, plan.rope.map(|r| r.rotary_dims))
    };
    assert_eq!(attention(qwen), (256, Some(64)));
    assert_eq!(attention(nemotron), (128, None));
}

#[test]
fn the_text_part_of_a_composite_model_is_read() {
    let text = r#"{"model_type": "qwen3_5", "tie_word_embeddings": true, "vision_config": {"depth": 2, "hidden_size": 7},
        "text_config": {"model_type": "qwen3_5_text", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 4, "intermediate_size": 16,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": true}}}"#;
    let a = parse(text).unwrap();
    assert_eq!((a.family, a.width, a.tied, a.spec().layer_map.as_str()), ("qwen3_5_text", 8, true, "G-G-G-*-"));
    assert!(a.prefixes.contains(&"model.language_model."));
    let unnamed = text.replace(r#""model_type": "qwen3_5_text", "#, "");
    assert_eq!(parse(&unnamed).unwrap().family, "qwen3_5_text");
}

#[test]
fn a_feed_forward_width_may_be_adjusted() {
    let width = |more: &str| {
        let text = format!(
            r#"{{"model_type": "lfm2", "vocab_size": 8, "hidden_size": 2048, "num_attention_heads": 32,
            "num_hidden_layers": 1, "full_attn_idxs": [0], {more}}}"#
        );
        match &parse(&text).unwrap().layers[0][1].branches[0].plan {
            Plan::Mlp(p) => p.inner,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(width(r#""block_ff_dim": 12288"#), 8192);
    assert_eq!(width(r#""block_ff_dim": 6656, "intermediate_size": 1"#), 4608);
    assert_eq!(width(r#""intermediate_size": 10752, "block_auto_adjust_ff_dim": false"#), 10_752);
    assert_eq!(width(r#""block_ff_dim": 6000, "block_ffn_dim_multiplier": 0.5, "block_multiple_of": 64"#), 2048);
}

#[test]
fn layers_that_share_weights_count_them_once() {
    let a = parse(
        r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 16}"#,
    )
    .unwrap();
    let mut shared = a.clone();
    shared.layers[1][1].branches[0].prefix = shared.layers[0][1].branches[0].prefix.clone();
    assert_eq!(a.spec().parameters - shared.spec().parameters, 3 * 8 * 16);
}

#[test]
fn the_original_mamba2_configuration_is_read() {
    let text = r#"{"d_model": 2560, "d_intermediate": 0, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
        "attn_layer_idx": [], "rms_norm": true, "pad_vocab_size_multiple": 16, "tie_embeddings": true}"#;
    let a = parse(text).unwrap();
    assert_eq!((a.vocab, a.tied, a.layers.len()), (50_288, true, 64));
    assert_eq!(a.spec().layers[0].recurrent, Some([80, 64, 128]));
    assert_eq!(a.spec().layers[0].conv, Some([5120 + 256, 3]));
}

#[test]
fn sliding_windows_need_the_switch() {
    let read = |more: &str| {
        let text = format!(
            r#"{{"model_type": "qwen3", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4,
            "intermediate_size": 8, "num_hidden_layers": 3, "sliding_window": 16 {more}}}"#
        );
        let windows = |s: &SubLayer| match &s.branches[0].plan {
            Plan::Attention(p) => p.window,
            other => panic!("{other:?}"),
        };
        parse(&text).unwrap().layers.iter().map(|l| windows(&l[0])).collect::<Vec<_>>()
    };
    let types = r#", "layer_types": ["full_attention", "sliding_attention", "full_attention"]"#;
    assert_eq!(read(types), [None; 3]);
    assert_eq!(read(&format!(r#"{types}, "use_sliding_window": true"#)), [None, Some(16), None]);
    assert_eq!(read(r#", "use_sliding_window": true, "max_window_layers": 1"#), [None, Some(16), Some(16)]);
    assert_eq!(read(r#", "max_window_layers": 1"#), [None; 3]);
}

#[test]
fn layers_of_kimi_linear_are_counted_from_1_in_the_published_files() {
    let map = |more: &str| {
        let text = format!(
            r#"{{"model_type": "kimi_linear", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 6{more}}}"#
        );
        parse(&text).unwrap().spec().layer_map
    };
    let lists = r#", "linear_attn_config": {"full_attn_layers": [2, 6], "kda_layers": [1, 3, 4, 5], "num_heads": 2}"#;
    assert_eq!(map(lists), "K-*EKEKEKE*E");
    assert_eq!(map(r#", "first_k_dense_replace": 2"#), "K-K-KEKE*EKE");
    let types = r#", "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention",
        "linear_attention", "linear_attention"], "mlp_layer_types": ["sparse", "dense", "dense", "dense", "dense", "dense"]"#;
    assert_eq!(map(types), "*EK-K-K-K-K-");
}

#[test]
fn shared_blocks_of_zamba2_take_turns_and_their_adapters_count_for_each_use() {
    let a = parse(
        r#"{"model_type": "zamba2", "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 38, "n_mamba_heads": 64,
        "hybrid_layer_ids": [5, 11, 17, 23, 29, 35], "mamba_d_state": 128, "use_shared_attention_adapter": true}"#,
    )
    .unwrap();
    // The number of weights of the published Zamba2-1.2B.
    assert_eq!(a.spec().parameters, 1_215_064_704);
    let two = parse(
        r#"{"model_type": "zamba2", "vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 5, "num_mem_blocks": 2,
        "hybrid_layer_ids": [0, 2, 4], "num_attention_heads": 4}"#,
    )
    .unwrap();
    let prefixes = |i: usize| two.layers[i].iter().map(|s| s.branches[0].prefix.as_str()).collect::<Vec<_>>();
    assert_eq!(prefixes(0)[0], "layers.0.shared_transformer.self_attn.");
    assert_eq!(prefixes(2)[0], "layers.2.shared_transformer.self_attn.");
    assert_eq!(
        prefixes(4)[..2],
        ["layers.0.shared_transformer.self_attn.", "layers.0.shared_transformer.feed_forward."]
    );
}
