//! Cases of `activation`.

use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table, act, sigmoid};
use selkie_core::backend::Handle;
use selkie_core::ops::{Act, Activation, Op};

#[derive(Clone)]
pub(super) struct Glu {
    rows: usize,
    cols: usize,
    act: Act,
    up: bool,
    row_gate: bool,
    rms: f32,
    /// gate and up are columns of one matrix, the row gate of another.
    views: bool,
}

impl Spec for Glu {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, dims, n) = (Host::default(), [self.rows, self.cols], self.rows * self.cols);
        h.float("gate", d.act, &dims, rng.vec(n, self.rms));
        if self.up {
            h.float("up", d.act, &dims, rng.vec(n, 1.0));
        }
        if self.row_gate {
            h.float("row_gate", d.act, &[self.rows, 1], rng.vec(self.rows, 2.0));
        }
        h.out("out", d.act, &dims);
        if self.views {
            if self.up {
                h.join(&["gate", "up"], 4);
            }
            if self.row_gate {
                h.spread("row_gate", 3, 7);
            }
            h.spread("out", 4, 8);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let out = h.get("gate").iter().enumerate().map(|(i, &g)| {
            let up = if self.up { h.get("up")[i].into() } else { 1.0 };
            let row = if self.row_gate { sigmoid(h.get("row_gate")[i / self.cols].into()) } else { 1.0 };
            Want::Near(act(self.act, g.into()) * up * row)
        });
        vec![("out", out.collect())]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        Activation { gate: b.t("gate"), up: b.opt("up"), row_gate: b.opt("row_gate"), out: b.t("out"), act: self.act }
            .into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let base = Glu { rows: 5, cols: 68, act: Act::Silu, up: true, row_gate: false, rms: 2.0, views: false };
    to.add("base", base.clone());
    let acts = [
        ("identity", Act::Identity),
        ("silu", Act::Silu),
        ("sigmoid", Act::Sigmoid),
        ("relu2", Act::Relu2),
        ("gelu", Act::Gelu),
    ];
    for (name, act) in acts {
        to.add(&format!("{name} alone"), Glu { act, up: false, ..base.clone() });
        to.add(&format!("{name}, gated"), Glu { act, ..base.clone() });
        to.add(&format!("{name}, large numbers"), Glu { act, rms: 60.0, up: false, ..base.clone() });
    }
    to.add("row gate", Glu { row_gate: true, ..base.clone() });
    to.add("row gate alone", Glu { act: Act::Identity, up: false, row_gate: true, ..base.clone() });
    to.add("one row", Glu { rows: 1, ..base.clone() });
    to.add("300 rows of 4", Glu { rows: 300, cols: 4, ..base.clone() });
    to.add("width 2052", Glu { cols: 2052, ..base.clone() });
    to.add("columns of wider matrices", Glu { views: true, row_gate: true, ..base.clone() });
    for rows in [1, 512] {
        to.sized(
            Size::Bench,
            &format!("{rows} x 21504, relu2"),
            Glu { rows, cols: 21504, act: Act::Relu2, up: false, ..base },
        );
    }
}
