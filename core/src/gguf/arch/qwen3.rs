//! `qwen3`.

use serde_json::{Map, Value};

use super::{Arch, Change, Facts, Rule, attention, copies, ends, llama};
use crate::Result;

pub(super) const ARCH: Arch = Arch { names: &["qwen3"], config, rules };

fn config(f: &Facts<'_>, c: &mut Map<String, Value>) -> Result<()> {
    c.insert("model_type".into(), "qwen3".into());
    f.attention(c)?;
    f.rope(c)
}

fn rules(f: &Facts<'_>) -> Result<Vec<Rule>> {
    let mut rules = ends("model.embed_tokens.weight", "model.norm.weight", Change::None);
    llama::layer(&mut rules);
    attention(&mut rules, f, "model.layers.{}.self_attn.", false)?;
    let norms = [("q_norm", "attn_q_norm"), ("k_norm", "attn_k_norm")];
    copies(&mut rules, "model.layers.{}.self_attn.", &norms);
    Ok(rules)
}
