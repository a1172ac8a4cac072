//! `llama`: q and k are stored with the rows of a head's halves interleaved.

use serde_json::{Map, Value};

use super::{Arch, Change, Facts, Rule, attention, copies, ends};
use crate::Result;

pub(super) const ARCH: Arch = Arch { names: &["llama"], config, rules };

fn config(f: &Facts<'_>, c: &mut Map<String, Value>) -> Result<()> {
    if let Some(n) = f.opt("expert_count")?.filter(|n| *n > 0) {
        return Err(
            f.bad("expert_count", format_args!("{n} experts; only dense models of this architecture are supported"))
        );
    }
    c.insert("model_type".into(), "llama".into());
    c.insert("mlp_bias".into(), f.any("ffn_up.bias")?.into());
    f.attention(c)?;
    f.rope(c)
}

fn rules(f: &Facts<'_>) -> Result<Vec<Rule>> {
    let mut rules = ends("model.embed_tokens.weight", "model.norm.weight", Change::None);
    layer(&mut rules);
    attention(&mut rules, f, "model.layers.{}.self_attn.", true)?;
    Ok(rules)
}

/// Norms and the MLP of a transformer layer under the usual names.
pub(super) fn layer(rules: &mut Vec<Rule>) {
    let pairs = [
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    copies(rules, "model.layers.{}.", &pairs);
}
