//! Zamba2: Mamba-2 layers. Before some of them a transformer block, whose weights several of these layers share, reads the
//! stream beside the embeddings; its result is added to the input of the layer's Mamba-2, not to the stream.

use super::{
    Architecture, Branch, Input, Norm, NormKind, Output, SubLayer,
    readers::{act, conv_taps, dt_limit, expanded, layer_types, mamba_groups, no_such_layer},
};
use crate::{
    Result,
    blocks::{
        adapter, attention, linear,
        mamba2::{self, Gating},
        mlp,
    },
    config::{Config, Heads, LayerType},
    rope::Rope,
};

/// Layers with a shared block of a file with 54 layers that does not say which.
const HYBRID: [usize; 9] = [6, 12, 18, 24, 30, 36, 42, 47, 51];

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-5)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::Plain };
    let mut a = Architecture::start(c, "zamba2", 4096, true, norm("final_layernorm.weight".into()))?;
    if c.bool_or("use_long_context", false)? {
        a.context = 16_384;
    }
    let sizes = Sizes { c, width: a.width, bias: c.bool_or("add_bias_linear", false)? };
    let (mamba, attention, mlp) = (sizes.mamba()?, sizes.attention()?, sizes.mlp()?);
    let adapters = Adapters {
        rank: c.usize_or("adapter_rank", 128)?,
        attention: c.bool_or("use_shared_attention_adapter", false)?,
    };
    let blocks = c.usize_or("num_mem_blocks", 1)?;
    // The layers whose names the weights of the shared blocks have, and the number of layers with a block so far.
    let (mut owners, mut uses) = (Vec::new(), 0);
    for (i, layer) in types(c)?.into_iter().enumerate() {
        let name = |leaf: &str| format!("layers.{i}.{leaf}");
        let normed = |name: String, leaf: &str| norm(format!("{name}{leaf}.weight"));
        a.layers.push(match layer {
            LayerType::Recurrent => vec![SubLayer::pre_norm(
                normed(name(""), "input_layernorm"),
                vec![Branch::new(name("mamba."), mamba.clone())],
            )],
            LayerType::Hybrid => {
                if owners.len() < blocks {
                    owners.push(i);
                }
                let shared = format!("layers.{}.shared_transformer.", owners[uses % blocks]);
                let attention = adapters.of_attention(&attention, uses);
                let mlp = adapters.of_mlp(&mlp, uses);
                uses += 1;
                vec![
                    keep(
                        Input::BesideEmbedding(normed(shared.clone(), "input_layernorm")),
                        Branch::new(format!("{shared}self_attn."), attention),
                    ),
                    keep(
                        Input::Kept(Some(normed(shared.clone(), "pre_ff_layernorm"))),
                        Branch::new(format!("{shared}feed_forward."), mlp),
                    ),
                    keep(Input::Kept(None), Branch::new(name("linear."), linear::Plan { width: a.width })),
                    SubLayer {
                        input: Input::PlusKept(normed(name("mamba_decoder."), "input_layernorm")),
                        branches: vec![Branch::new(name("mamba_decoder.mamba."), mamba.clone())],
                        output: Output::Add,
                    },
                ]
            }
            other => return Err(no_such_layer(c, other)),
        });
    }
    Ok(a)
}

/// `y = branch(input)`.
fn keep(input: Input, branch: Branch) -> SubLayer {
    SubLayer { input, branches: vec![branch], output: Output::Keep }
}

/// From the list of types, or else from the list of layers with a block.
fn types(c: &Config) -> Result<Vec<LayerType>> {
    const IDS: &str = "hybrid_layer_ids";
    const TYPES: &str = "layers_block_type|layer_types";
    let count = c.layers("num_hidden_layers")?;
    let listed = c.opt_usizes(IDS)?;
    if let Some(i) = listed.iter().flatten().find(|i| **i >= count) {
        return Err(c.bad(IDS, format_args!("layer {i} of {count}")));
    }
    let ids = match listed {
        Some(ids) => ids,
        None if count == 54 => HYBRID.to_vec(),
        None if c.has(TYPES) => Vec::new(),
        None => return Err(c.bad(TYPES, "it is missing, and there is no `hybrid_layer_ids` either")),
    };
    layer_types(c, |i| if ids.contains(&i) { LayerType::Hybrid } else { LayerType::Recurrent })
}

/// What each use of a shared block adds to its projections.
struct Adapters {
    rank: usize,
    /// To q, k and v as well.
    attention: bool,
}

impl Adapters {
    fn of_attention(&self, plan: &attention::Plan, number: usize) -> attention::Plan {
        let names = ["q", "k", "v"].map(|x| format!("linear_{x}_adapter_list.{number}")).into();
        let adapter = self.attention.then_some(adapter::Plan { rank: self.rank, names });
        attention::Plan { adapter, ..plan.clone() }
    }

    fn of_mlp(&self, plan: &mlp::Plan, number: usize) -> mlp::Plan {
        let names = vec![format!("gate_up_proj_adapter_list.{number}")];
        mlp::Plan { adapter: Some(adapter::Plan { rank: self.rank, names }), ..plan.clone() }
    }
}

struct Sizes<'a> {
    c: &'a Config,
    width: usize,
    bias: bool,
}

impl Sizes<'_> {
    fn mamba(&self) -> Result<mamba2::Plan> {
        let c = self.c;
        let inner = expanded(c, "mamba_expand", self.width)?;
        let heads = c.usize_or("n_mamba_heads", 8)?;
        c.divides(("mamba_expand", inner), ("n_mamba_heads", heads))?;
        self.same("mamba_headdim", inner / heads)?;
        let plan = mamba2::Plan {
            width: self.width,
            heads,
            head_dim: inner / heads,
            state: c.usize_or("mamba_d_state", 64)?,
            groups: c.usize_or("mamba_ngroups", 1)?,
            kernel: conv_taps(c, "mamba_d_conv")?,
            // The family's own code has it whatever `use_conv_bias` says.
            conv_bias: true,
            bias: [self.bias; 2],
            input_scale: 1.0,
            scales: [1.0; 5],
            gate: Gating::BeforeNorm,
            // Fixed, independent of `rms_norm_eps`.
            eps: 1e-5,
            dt_limit: dt_limit(c)?,
        };
        mamba_groups(c, &plan, "n_mamba_heads", "mamba_ngroups")?;
        Ok(plan)
    }

    fn attention(&self) -> Result<attention::Plan> {
        let c = self.c;
        let input = 2 * self.width;
        let heads = c.usize_or("num_attention_heads", 32)?;
        let kv_heads = c.usize_or("num_key_value_heads", heads)?;
        c.divides(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
        c.divides(("attention_hidden_size", input), ("num_attention_heads", heads))?;
        let head_dim = input / heads;
        if !head_dim.is_multiple_of(2) {
            return Err(c.bad("num_attention_heads", format_args!("an odd head dim, {head_dim}")));
        }
        self.same("attention_hidden_size", input)?;
        self.same("attention_head_dim|head_dim", head_dim)?;
        Ok(attention::Plan {
            input,
            rope: if c.bool_or("use_mem_rope", false)? { Some(Rope::read(c, head_dim, 1e4)?) } else { None },
            scale: (head_dim as f32 / 2.0).sqrt().recip(),
            ..attention::Plan::new(self.width, Heads { heads, kv_heads, head_dim })
        })
    }

    fn mlp(&self) -> Result<mlp::Plan> {
        let c = self.c;
        Ok(mlp::Plan {
            width: self.width,
            inner: c.usize_or("intermediate_size", 4 * self.width)?,
            input: mlp::Input::Fused("gate_up_proj"),
            output: "down_proj",
            act: act(c, "hidden_act", "gelu")?,
            bias: self.bias,
            gate_scale: 1.0,
            row_gate: None,
            adapter: None,
        })
    }

    /// Refuses a size that is not the one which follows from the others.
    fn same(&self, key: &str, derived: usize) -> Result<()> {
        match self.c.opt_usize(key)? {
            Some(size) if size != derived => Err(self
                .c
                .bad(key, format_args!("{size} is not supported, only {derived}, which the other sizes give"))),
            _ => Ok(()),
        }
    }
}
