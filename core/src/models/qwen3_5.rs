//! Qwen3.5, the text part: Qwen3-Next with plain projections of Gated DeltaNet; dense, or experts in every layer.

use super::{
    Architecture, Norm, NormKind,
    qwen3_next::{common, layer, mixer, mlp, moe, types},
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
    for (i, ty) in types(c)?.into_iter().enumerate() {
        let feed_forward = match experts {
            Some(experts) => moe(c, a.width, (experts, 8), true, format!("layers.{i}.mlp."))?,
            None => vec![mlp(c, a.width, i)?],
        };
        a.layers.push(layer(i, eps, mixer(c, i, ty, a.width, Projections::Separate)?, feed_forward));
    }
    Ok(a)
}
