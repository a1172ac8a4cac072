//! Device memory of the states of all layers, allocated once at load.
//!
//! A pool is split along independent axes (KV heads, channels, heads of a recurrent state), never along slots or pages, so
//! that every piece fits into one binding. Slot 0 and page 0 read as zero and discard writes; they come on top of the
//! numbers given here.

use crate::{
    Error, Result,
    backend::{Backend, Caps},
    layer::{KvShape, LayerPools, LayerState},
    models::ModelSpec,
    ops::KvPool,
    step::PAGE,
    tensor::{DType, Tensor},
};

/// Bytes of one slot: the convolution and recurrent states of all layers at one position of one sequence.
pub fn slot_bytes(spec: &ModelSpec, caps: &Caps) -> u64 {
    let layer = |l: &LayerState| {
        let conv = l.conv.map_or(0, |[c, k]| c * k * caps.conv.bytes());
        (conv + l.recurrent.map_or(0, |[h, p, n]| h * p * n * caps.state.bytes())) as u64
    };
    spec.layers.iter().map(layer).sum()
}

/// Bytes of one page: keys and values of 64 tokens in all layers with attention.
pub fn page_bytes(spec: &ModelSpec, caps: &Caps) -> u64 {
    let layer = |l: &LayerState| {
        let token = |kv: KvShape| kv.stored(caps.kv).iter().sum::<usize>() * caps.kv.bytes();
        l.kv.map_or(0, |kv| (kv.heads * PAGE * token(kv)) as u64)
    };
    spec.layers.iter().map(layer).sum()
}

/// Memory for `slots` sequence states and `pages` pages of 64 tokens, slot 0 and page 0 not counted; one entry per layer.
///
/// # Errors
/// [`Error::BadRequest`] if even one head (or channel) of that many slots or pages is larger than one binding,
/// with the number that fits; [`Error::OutOfMemory`] from the backend.
pub fn alloc<B: Backend>(backend: &B, spec: &ModelSpec, slots: usize, pages: usize) -> Result<Vec<LayerPools<B::Buf>>> {
    let caps = backend.caps();
    let tensor = |label: &str, dtype: DType, dims: &[usize]| {
        let bytes = dims.iter().product::<usize>() * dtype.bytes();
        Ok(Tensor::new(backend.alloc(label, bytes as u64)?, dtype, dims))
    };
    let layer = |(i, state): (usize, &LayerState)| {
        let mut pools = LayerPools { kv: Vec::new(), conv: Vec::new(), recurrent: Vec::new() };
        if let Some(kv) = state.kv {
            for heads in split(kv.heads, head_bytes(kv, caps), pages, caps.max_binding, "KV pages")? {
                let dims = |width| [pages + 1, heads, PAGE, width];
                let [key, value] = kv.stored(caps.kv);
                let k = tensor(&format!("keys of layer {i}"), caps.kv, &dims(key))?;
                let v = tensor(&format!("values of layer {i}"), caps.kv, &dims(value))?;
                pools.kv.push(KvPool { k, v });
            }
        }
        if let Some([channels, taps]) = state.conv {
            for c in split(channels, taps * caps.conv.bytes(), slots, caps.max_binding, "slots")? {
                let label = format!("convolution states of layer {i}");
                pools.conv.push(tensor(&label, caps.conv, &[slots + 1, c, taps])?);
            }
        }
        if let Some([heads, p, n]) = state.recurrent {
            for h in split(heads, p * n * caps.state.bytes(), slots, caps.max_binding, "slots")? {
                let label = format!("recurrent states of layer {i}");
                pools.recurrent.push(tensor(&label, caps.state, &[slots + 1, h, p, n])?);
            }
        }
        Ok(pools)
    };
    spec.layers.iter().enumerate().map(layer).collect()
}

/// Whether [`alloc`] can split pools of that many slots and pages so that every piece fits into a binding.
///
/// # Errors
/// [`Error::BadRequest`] as there.
pub fn check(spec: &ModelSpec, caps: &Caps, slots: usize, pages: usize) -> Result<()> {
    for state in &spec.layers {
        if let Some(kv) = state.kv {
            split(kv.heads, head_bytes(kv, caps), pages, caps.max_binding, "KV pages")?;
        }
        if let Some([channels, taps]) = state.conv {
            split(channels, taps * caps.conv.bytes(), slots, caps.max_binding, "slots")?;
        }
        if let Some([heads, p, n]) = state.recurrent {
            split(heads, p * n * caps.state.bytes(), slots, caps.max_binding, "slots")?;
        }
    }
    Ok(())
}

/// Bytes of a head's keys or of its values in a page, of the wider ones.
fn head_bytes(kv: KvShape, caps: &Caps) -> usize {
    let [key, value] = kv.stored(caps.kv);
    PAGE * key.max(value) * caps.kv.bytes()
}

/// Sizes of the fewest, nearly equal blocks of `units` whose `count + 1` entries fit into `limit` bytes each.
fn split(units: usize, unit_bytes: usize, count: usize, limit: u64, what: &str) -> Result<Vec<usize>> {
    let most = limit / ((count as u64 + 1) * unit_bytes as u64);
    if most == 0 {
        return Err(Error::BadRequest(format!(
            "{count} {what} are too many for this device: one binding holds {limit} bytes, which is at most {} {what}",
            (limit / unit_bytes as u64).saturating_sub(1)
        )));
    }
    let blocks = units.div_ceil(usize::try_from(most).unwrap_or(units).min(units));
    Ok((0..blocks).map(|b| units * (b + 1) / blocks - units * b / blocks).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_all_units_and_fit() {
        for (units, unit_bytes, count, limit) in
            [(128, 100, 9, 100_000), (7, 16, 1, 100), (80, 32, 3, 128 * 10), (1, 8, 1, 16)]
        {
            let blocks = split(units, unit_bytes, count, limit, "slots").unwrap();
            assert_eq!(blocks.iter().sum::<usize>(), units);
            assert!(blocks.iter().all(|b| *b > 0 && (b * unit_bytes * (count + 1)) as u64 <= limit), "{blocks:?}");
        }
        assert_eq!(split(8, 100, 9, u64::MAX, "slots").unwrap(), [8]);
    }

    #[test]
    fn what_fits_in_no_binding_is_refused_with_the_number_that_does() {
        let message = split(4, 100, 10, 1000, "slots").unwrap_err().to_string();
        assert!(message.contains("10 slots") && message.contains("at most 9 slots"), "{message}");
    }
}
