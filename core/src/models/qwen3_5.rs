//! Qwen3.5, the text part: Qwen3-Next with plain projections of Gated DeltaNet; dense, or experts in every layer.

use super::{
    Architecture, Norm, NormKind,
    qwen3_next::{HEAD, common, head, layer, mixer, mlp, moe, types},
};
use crate::{Result, blocks::gated_delta::Projections, config::Config};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    architecture(c, "qwen3_5_text", None)
}

pub(super) fn read_moe(c: &Config) -> Result<Architecture> {
    architecture(c, "qwen3_5_moe_text", Some(c.usize_or("num_experts", 256)?))
}

fn architecture(c: &Config, family: &'static str, experts: Option<usize>) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-6)?;
    let norm = Norm { name: "norm.weight".into(), eps, kind: NormKind::ZeroCentred };
    let mut a = Architecture::start(c, family, 32_768, false, norm)?;
    common(c)?;
    let width = a.width;
    let feed_forward = |prefix: &str| match experts {
        Some(experts) => moe(c, width, (experts, 8), true, prefix),
        None => Ok(vec![mlp(c, width, prefix)?]),
    };
    for (i, ty) in types(c)?.into_iter().enumerate() {
        let prefix = format!("layers.{i}.");
        let mixer = mixer(c, &prefix, ty, a.width, Projections::Separate)?;
        a.layers.push(layer(&prefix, eps, mixer, feed_forward(&prefix)?));
    }
    a.head = head(c, a.width, feed_forward(HEAD)?)?;
    Ok(a)
}
