//! Cases of `conv1d`.

use super::batch::{Batch, Tables, cut, find, stateful};
use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table, silu};
use selkie_core::backend::Handle;
use selkie_core::ops::{Act, Conv1d, Op};
use selkie_core::tensor::DType;

#[derive(Clone)]
pub(super) struct Conv {
    batch: Batch,
    channels: usize,
    taps: usize,
    bias: bool,
    act: Act,
    /// Inputs and outputs are columns of wider matrices.
    views: bool,
}

impl Spec for Conv {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, t, c, k) = (Host::default(), self.batch.bucket.tokens, self.channels, self.taps);
        h.step(&self.batch);
        h.float("x", d.act, &[t, c], rng.tokens(&self.batch, c, 1.0));
        let mut w = rng.vec(c * (k + 1), 0.5);
        if !self.bias {
            w.iter_mut().skip(k).step_by(k + 1).for_each(|b| *b = 0.0);
        }
        h.float("weight", DType::F32, &[c, k + 1], w);
        h.float("pool", d.conv, &[self.batch.slots(), c, k - 1], rng.slots(&self.batch, c * (k - 1), 1.0));
        h.out("out", d.act, &[t, c]);
        if self.views {
            h.spread("x", 8, 20);
            h.spread("out", 4, 12);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let (c, k) = (self.channels, self.taps);
        let tables = Tables::new(h.ints("ints"), self.batch.bucket);
        let (x, w, pool) = (h.get("x"), h.get("weight"), h.get("pool"));
        let mut out = vec![Want::Exact(0.0); tables.bucket.tokens * c];
        let mut states = vec![Want::Keep; pool.len()];
        let mut src = 0;
        for chunk in tables.chunks() {
            let first = tables.first_token(chunk.row);
            if chunk.start == first {
                src = chunk.src as usize;
            }
            // Input of channel `ch` at `back` tokens before packed token `t` of this row.
            let input = |t: usize, back: usize, ch: usize| -> f64 {
                match (t - first).checked_sub(back) {
                    Some(i) => x[(first + i) * c + ch].into(),
                    None if src == 0 => 0.0,
                    None => pool[(src * c + ch) * (k - 1) + (k - 1) - (back - (t - first))].into(),
                }
            };
            for t in chunk.start..chunk.start + chunk.len {
                for ch in 0..c {
                    let w = &w[ch * (k + 1)..(ch + 1) * (k + 1)];
                    let sum: f64 = (0..k).map(|j| f64::from(w[j]) * input(t, k - 1 - j, ch)).sum();
                    let y = sum + f64::from(w[k]);
                    out[t * c + ch] = Want::Near(if self.act == Act::Silu { silu(y) } else { y });
                }
            }
            if chunk.dst != 0 {
                let last = chunk.start + chunk.len - 1;
                for ch in 0..c {
                    for j in 0..k - 1 {
                        states[(chunk.dst * c + ch) * (k - 1) + j] = Want::Near(input(last, k - 2 - j, ch));
                    }
                }
            }
        }
        vec![("out", out), ("pool", states)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        Conv1d { step: b.step(), x: b.t("x"), weight: b.t("weight"), pool: b.t("pool"), out: b.t("out"), act: self.act }
            .into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let base = Conv {
        batch: Batch::new(vec![cut(37, 99, 1, &[0, 2, 3])]),
        channels: 24,
        taps: 4,
        bias: true,
        act: Act::Silu,
        views: false,
    };
    to.add("base", base.clone());
    for (name, batch) in stateful() {
        to.add(name, Conv { batch, ..base.clone() });
    }
    to.add("no bias", Conv { bias: false, ..base.clone() });
    to.add("identity", Conv { act: Act::Identity, ..base.clone() });
    to.add("2 taps", Conv { taps: 2, ..base.clone() });
    to.add("3 taps", Conv { taps: 3, ..base.clone() });
    to.add("8 taps", Conv { taps: 8, ..base.clone() });
    to.add("4 channels", Conv { channels: 4, ..base.clone() });
    to.add("260 channels", Conv { channels: 260, ..base.clone() });
    to.add("columns of wider matrices", Conv { views: true, ..base.clone() });
    // LFM2.
    let gated = Conv { channels: 2048, taps: 3, bias: false, act: Act::Identity, views: true, ..base.clone() };
    for name in ["decode of 8 rows", "verification of 3 rows", "captures"] {
        to.add(&format!("2048 channels of 3 taps, {name}"), Conv { batch: find(name), ..gated.clone() });
    }
    let wide = Conv { channels: 10240, views: true, ..base };
    to.sized(Size::Bench, "decode, 10240 channels", Conv { batch: find("decode in place"), ..wide.clone() });
    to.sized(Size::Bench, "decode of 8 rows, 10240 channels", Conv { batch: find("decode of 8 rows"), ..wide.clone() });
    to.sized(
        Size::Bench,
        "512 tokens, 10240 channels",
        Conv { batch: Batch::new(vec![cut(0, 512, 0, &[1, 0, 2])]), ..wide },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hand_computed_row() {
        let batch = Batch::new(vec![cut(63, 2, 1, &[2, 3])]);
        let spec = Conv { batch, channels: 1, taps: 3, bias: true, act: Act::Identity, views: false };
        let mut h = Host::default();
        h.step(&spec.batch);
        h.float("x", DType::F32, &[2, 1], vec![5.0, 7.0]);
        h.float("weight", DType::F32, &[1, 4], vec![1.0, 10.0, 100.0, 0.5]);
        h.float("pool", DType::F32, &[4, 1, 2], vec![0.0, 0.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]);
        let w = spec.want(&h);
        // 2 + 30 + 500 + 0.5; 3 + 50 + 700 + 0.5
        assert_eq!(w[0].1, [Want::Near(532.5), Want::Near(753.5)]);
        assert_eq!(w[1].1[4..], [3.0, 5.0, 5.0, 7.0].map(Want::Near));
        assert_eq!(w[1].1[..4], [Want::Keep; 4]);
    }
}
