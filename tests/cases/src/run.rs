//! Runs a case on a backend and compares the result with the contract.

use std::fmt;
use std::sync::Arc;

use super::host::{Array, Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Case, Size, Spec};
use selkie_core::Result;
use selkie_core::backend::{Backend, Ops};
use selkie_core::ops::Op;
use selkie_core::source::Bytes;
use selkie_core::tensor::{DType, Tensor};

/// Largest RMS error over RMS value, of an output or of one slot: for f32, and where activations or the array have 16
/// bits. A single element may be off by ten times that.
const LIMITS: [(&str, f64, f64); 22] = [
    ("embed", 1e-6, 3e-3),
    ("gather", 0.0, 0.0),
    ("rms_norm", 1e-5, 1e-2),
    ("matmul", 1e-5, 1e-2),
    ("activation", 1e-5, 1e-2),
    ("rope_kv", 1e-5, 1e-2),
    ("attention", 1e-5, 1e-2),
    ("conv1d", 1e-5, 1e-2),
    ("selective_scan", 1e-4, 1e-2),
    ("gated_delta", 1e-4, 1e-2),
    ("head_matmul", 1e-5, 1e-2),
    ("latent_kv", 1e-5, 1e-2),
    ("latent_attention", 1e-5, 1e-2),
    // All in f32 on every device.
    ("route", 1e-5, 1e-5),
    ("expert_matmul", 1e-5, 1e-2),
    ("sample", 0.0, 0.0),
    ("adjust", 1e-6, 1e-6),
    ("logprobs", 1e-5, 1e-5),
    ("all_reduce", 1e-6, 1e-2),
    ("all_gather", 0.0, 0.0),
    ("rank_norm", 1e-5, 1e-2),
    ("round", 0.0, 0.0),
];
/// Error of a single element over the RMS value plus its own, in units of the op's limit.
const ELEMENT: f64 = 10.0;
/// How far a code may be from the middle between two, and the error of a scale over the scale.
const CODE: f64 = 2e-3;

fn limit(op: &str, act: DType, products: DType, array: DType) -> f64 {
    let (_, f32, short) = LIMITS.into_iter().find(|(o, ..)| *o == op).unwrap_or_else(|| panic!("no limit for {op}"));
    let short_factors = products != DType::F32 && op == "matmul";
    if act == DType::F32 && array == DType::F32 && !short_factors { f32 } else { short }
}

/// The error of one output, or of one slot of a pool.
#[derive(Clone, Debug)]
pub struct Check {
    /// Name of the argument, with the slot or page if there are several.
    pub what: String,
    /// RMS error over RMS value.
    pub ratio: f64,
    /// Largest error of an element over the RMS value plus its own.
    pub element: f64,
    /// Limit of `ratio`; that of `element` is ten times as large.
    pub limit: f64,
}

impl Check {
    fn ok(&self) -> bool {
        // Written so that NaN fails.
        self.ratio <= self.limit && self.element <= ELEMENT * self.limit
    }
}

/// The result of running a case.
#[derive(Clone, Debug, Default)]
pub struct CaseReport {
    /// Errors, one per output and written slot.
    pub checks: Vec<Check>,
    /// Failures as text; empty if the case passed.
    pub failures: Vec<String>,
}

impl CaseReport {
    /// Whether everything was as the contract says.
    pub fn ok(&self) -> bool {
        self.failures.is_empty()
    }

    /// The largest error in units of its limit.
    pub fn worst(&self) -> f64 {
        self.checks.iter().map(|c| c.ratio / c.limit).fold(0.0, f64::max)
    }
}

impl fmt::Display for CaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ok() {
            return write!(f, "ok, worst error {:.2} of its limit", self.worst());
        }
        f.write_str(&self.failures.join("\n"))
    }
}

/// A case's arguments and the bytes around them.
pub(super) struct Prepared {
    op: &'static str,
    act: DType,
    products: DType,
    pub host: Host,
    pub images: Vec<Vec<u8>>,
    pub wants: Wants,
}

impl Prepared {
    pub fn new(case: &Case, d: Dtypes) -> Self {
        let host = case.spec.host(&d, &mut Rng::new(&case.id()));
        let (images, wants) = (host.images(), case.spec.want(&host));
        Self { op: case.op, act: d.act, products: d.products, host, images, wants }
    }

    fn writes(&self, buf: usize) -> bool {
        self.wants.iter().any(|(name, _)| self.host.array(name).buf == buf)
    }

    /// Compares the bytes of all buffers (empty = not read) after the op.
    pub fn judge(&self, got: &[Vec<u8>]) -> CaseReport {
        let mut report = CaseReport::default();
        // Bytes that the op may change.
        let mut free: Vec<Vec<bool>> = self.images.iter().map(|_| vec![]).collect();
        for (name, want) in &self.wants {
            let a = self.host.array(name);
            let free = &mut free[a.buf];
            free.resize(self.images[a.buf].len(), false);
            for (i, _) in want.iter().enumerate().filter(|(_, w)| **w != Want::Keep) {
                free[a.at(i)].fill(true);
            }
            let part = if a.dims.len() > 2 { a.dims[1..].iter().product() } else { want.len() };
            for (p, want) in want.chunks(part).enumerate() {
                let what = if a.dims.len() <= 2 { name.to_string() } else { format!("{name}[{p}]") };
                self.compare(a, &what, p * part, want, &got[a.buf], &mut report);
            }
        }
        for (buf, (image, got)) in self.images.iter().zip(got).enumerate().filter(|(_, (_, g))| !g.is_empty()) {
            let wrong: Vec<usize> = (0..image.len())
                .filter(|&i| got[i] != image[i] && !free[buf].get(i).copied().unwrap_or(false))
                .collect();
            if let Some(&first) = wrong.first() {
                let place = self.place(buf, first);
                report.failures.push(format!("{} bytes changed that must not: first {place}", wrong.len()));
            }
        }
        report
    }

    fn compare(&self, a: &Array, what: &str, start: usize, want: &[Want], got: &[u8], report: &mut CaseReport) {
        let (mut error, mut value, mut count) = (0.0, 0.0, 0usize);
        for (i, w) in want.iter().enumerate() {
            match *w {
                Want::Near(v) => {
                    error += (a.read(start + i, got) - v).powi(2);
                    value += v * v;
                    count += 1;
                }
                Want::Exact(v) => {
                    let x = a.read(start + i, got);
                    if x != v {
                        report.failures.push(format!("{what}: element {i} is {x}, not {v}"));
                        return;
                    }
                }
                Want::Code(v) => {
                    let x = a.read(start + i, got);
                    let near = (x - v).abs() <= 0.5 + CODE;
                    if !near {
                        report.failures.push(format!("{what}: code {i} is {x}, not {v} rounded"));
                        return;
                    }
                }
                Want::Scale(v) => {
                    let at = a.at(start + i).start;
                    let x: f64 = f32::from_le_bytes([got[at], got[at + 1], got[at + 2], got[at + 3]]).into();
                    // NaN is not near.
                    let near = (x - v).abs() <= CODE * v;
                    if !near {
                        report.failures.push(format!("{what}: the scale at {i} is {x}, not {v}"));
                        return;
                    }
                }
                Want::Keep | Want::Any => {}
            }
        }
        if count == 0 {
            return;
        }
        let rms = (value / count as f64).sqrt().max(f64::from(f32::MIN_POSITIVE));
        let (mut element, mut worst) = (0.0, 0);
        for (i, w) in want.iter().enumerate() {
            if let Want::Near(v) = *w {
                let e = (a.read(start + i, got) - v).abs() / (rms + v.abs());
                if e > element || e.is_nan() {
                    (element, worst) = (e, i);
                }
                if e.is_nan() {
                    break;
                }
            }
        }
        let ratio = (error / count as f64).sqrt() / rms;
        let check =
            Check { what: what.into(), ratio, element, limit: limit(self.op, self.act, self.products, a.dtype) };
        if !check.ok() {
            let (x, v) = (a.read(start + worst, got), want[worst]);
            report.failures.push(format!(
                "{what}: error ratio {ratio:.2e}, of one element {element:.2e}, limit {:.0e}; element {worst} is {x}, \
                 not {v:?}",
                check.limit
            ));
        }
        report.checks.push(check);
    }

    /// Names a byte of a buffer.
    fn place(&self, buf: usize, byte: usize) -> String {
        let views = || self.host.arrays.iter().filter(|a| a.buf == buf);
        for a in views() {
            let n: usize = a.dims.iter().product();
            if let Some(i) = (0..n).find(|&i| a.at(i).contains(&byte)) {
                let row: usize = a.dims[1..].iter().product();
                return format!("element {} of row {} of {}", i % row, i / row, a.name);
            }
        }
        let names: Vec<&str> = views().map(|a| a.name.as_str()).collect();
        format!("byte {byte} in the buffer of {}, outside of every view", names.join(", "))
    }
}

/// A case on a device.
pub struct Loaded<B: Backend> {
    /// The op over the case's buffers.
    pub op: Op<B::Buf>,
    bufs: Vec<Option<B::Buf>>,
}

impl<B: Backend> Loaded<B> {
    /// Allocates and fills the buffers of `case` and reserves scratch, for benches: no reference is computed.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn new(backend: &B, case: &Case) -> Result<Self> {
        let host = case.spec.host(&backend.caps().into(), &mut Rng::new(&case.id()));
        let loaded = Self::of(backend, case, &host, &host.images())?;
        loaded.fill(backend, &host.images(), |_| true)?;
        loaded.arrange(backend, &host)?;
        Ok(loaded)
    }

    fn of(backend: &B, case: &Case, host: &Host, images: &[Vec<u8>]) -> Result<Self> {
        let alloc = |(i, image): (usize, &Vec<u8>)| -> Result<Option<B::Buf>> {
            if image.is_empty() {
                return Ok(None);
            }
            let codes = host.coded().find(|a| a.buf == i).map_or(0, |a| backend.coded_bytes(a.format, &a.dims));
            backend.alloc("case", codes.max(image.len() as u64)).map(Some)
        };
        let bufs = images.iter().enumerate().map(alloc).collect::<Result<Vec<_>>>()?;
        let bound = Bound { host, bufs };
        let op = case.spec.op(&bound);
        op.check();
        backend.reserve(backend.scratch(&op))?;
        Ok(Self { op, bufs: bound.bufs })
    }

    fn fill(&self, backend: &B, images: &[Vec<u8>], which: impl Fn(usize) -> bool) -> Result<()> {
        for (i, (buf, image)) in self.bufs.iter().zip(images).enumerate() {
            if let Some(buf) = buf.as_ref().filter(|_| which(i)) {
                backend.write(buf, 0, image)?;
            }
        }
        Ok(())
    }

    /// Brings coded weights, which were written as they are stored, into the device's order.
    fn arrange(&self, backend: &B, host: &Host) -> Result<()> {
        let bound = Bound { host, bufs: self.bufs.clone() };
        host.coded().try_for_each(|a| backend.arrange(&bound.block(&a.name, 0)))
    }

    async fn read(&self, backend: &B, images: &[Vec<u8>], which: impl Fn(usize) -> bool) -> Result<Vec<Vec<u8>>> {
        let mut all = vec![];
        for (i, (buf, image)) in self.bufs.iter().zip(images).enumerate() {
            all.push(match buf {
                Some(buf) if which(i) => {
                    backend.read(&Tensor::new(buf.clone(), DType::U32, &[image.len() / 4])).await?
                }
                _ => vec![],
            });
        }
        Ok(all)
    }
}

/// Runs `case` once, compares, and replays it twice from the restored buffers: the bits must be the same. A device that
/// reads weights in place in a file runs it once more, with weights at an odd address.
///
/// # Errors
/// Those of the backend; a wrong result is not an error but a failure in the report.
pub async fn run<B: Backend>(backend: &B, case: &Case) -> Result<CaseReport> {
    run_prepared(backend, case, Prepared::new(case, backend.caps().into())).await
}

/// Results of the cases of one op.
#[cfg(not(target_arch = "wasm32"))]
#[derive(Clone, Debug, Default)]
pub struct OpReport {
    /// Cases that were run.
    pub cases: usize,
    /// Id of each failed one, and why it failed.
    pub failures: Vec<(String, String)>,
}

/// Runs `cases` with these dtypes, for which the references are computed on all threads.
///
/// # Errors
/// Those of the backend; a wrong result is not an error.
#[cfg(not(target_arch = "wasm32"))]
pub async fn run_all<B: Backend>(backend: &B, cases: &[Case], dtypes: Dtypes) -> Result<OpReport> {
    use rayon::prelude::*;
    let mut report = OpReport { cases: cases.len(), failures: Vec::new() };
    for part in cases.chunks(selkie_core::cpu::par::threads()) {
        let prepared: Vec<Prepared> = part.par_iter().map(|c| Prepared::new(c, dtypes)).collect();
        for (case, prepared) in part.iter().zip(prepared) {
            let result = run_prepared(backend, case, prepared).await?;
            if !result.ok() {
                report.failures.push((case.id(), result.to_string()));
            }
        }
    }
    Ok(report)
}

async fn run_prepared<B: Backend>(backend: &B, case: &Case, mut p: Prepared) -> Result<CaseReport> {
    let mut on = Loaded::of(backend, case, &p.host, &p.images)?;
    on.fill(backend, &p.images, |_| true)?;
    on.arrange(backend, &p.host)?;
    // What the op must not change.
    let coded = |i: usize| p.host.coded().any(|a| a.buf == i);
    let arranged = on.read(backend, &p.images, coded).await?;
    for (image, arranged) in p.images.iter_mut().zip(arranged) {
        if !arranged.is_empty() {
            *image = arranged;
        }
    }
    let p = p;
    let writes = |i: usize| p.writes(i);
    backend.run(|ops| ops.op(on.op.clone()))?;
    let first = on.read(backend, &p.images, |i| case.size != Size::Bench || writes(i)).await?;
    let mut report = p.judge(&first);

    let mut again = |what: &str, got: Vec<Vec<u8>>| {
        if let Some(i) = (0..got.len()).find(|&i| !got[i].is_empty() && got[i] != first[i]) {
            let byte = (0..got[i].len()).find(|&b| got[i][b] != first[i][b]).expect("they differ");
            report.failures.push(format!("{what} differs from the run: first {}", p.place(i, byte)));
        }
    };
    let tape = backend.record(|ops| ops.op(on.op.clone()))?;
    for what in ["the first replay", "the second replay"] {
        on.fill(backend, &p.images, writes)?;
        backend.play(&tape)?;
        again(what, on.read(backend, &p.images, writes).await?);
    }

    let mut adopted = false;
    for (i, image) in p.images.iter().enumerate() {
        let mut views = p.host.arrays.iter().filter(|a| a.buf == i).peekable();
        if views.peek().is_some() && views.all(|a| a.weight) {
            let shifted: Vec<u8> = std::iter::once(0).chain(image.iter().copied()).collect();
            let bytes = Bytes::new(Arc::new(shifted));
            if let Some(buf) = backend.adopt(&bytes.slice(1..bytes.len())) {
                on.bufs[i] = Some(buf);
                adopted = true;
            }
        }
    }
    if adopted {
        let bound = Bound { host: &p.host, bufs: on.bufs.clone() };
        let op = case.spec.op(&bound);
        on.fill(backend, &p.images, writes)?;
        backend.run(|ops| ops.op(op))?;
        again("the run with adopted weights", on.read(backend, &p.images, writes).await?);
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use selkie_core::backend::Int8;

    use super::*;
    use crate::all;
    use crate::tests::F32;

    const BF16: Dtypes = Dtypes {
        act: DType::Bf16,
        products: DType::Bf16,
        int8: Int8::Never,
        kv: DType::Bf16,
        conv: DType::Bf16,
        state: DType::F32,
        ranks: 1,
    };

    fn find(id: &str) -> Case {
        all().into_iter().find(|c| c.id() == id).unwrap_or_else(|| panic!("no case {id}"))
    }

    /// The buffers after a perfect device.
    fn ideal(p: &Prepared) -> Vec<Vec<u8>> {
        let mut out = p.images.clone();
        for (name, want) in &p.wants {
            let a = p.host.array(name);
            for (i, w) in want.iter().enumerate() {
                let out = &mut out[a.buf];
                match *w {
                    Want::Near(v) | Want::Exact(v) => a.set(i, v, out),
                    Want::Code(v) => out[a.at(i).start] = v.round_ties_even() as i8 as u8,
                    Want::Scale(v) => out[a.at(i).start..][..4].copy_from_slice(&(v as f32).to_le_bytes()),
                    Want::Keep | Want::Any => {}
                }
            }
        }
        out
    }

    /// The ideal result with `spoil` applied to one array.
    fn spoiled(id: &str, array: &str, spoil: impl Fn(&Array, &Prepared, &mut Vec<u8>)) -> CaseReport {
        let p = Prepared::new(&find(id), F32);
        let mut got = ideal(&p);
        assert!(p.judge(&got).ok());
        let a = p.host.array(array);
        spoil(a, &p, &mut got[a.buf]);
        p.judge(&got)
    }

    #[test]
    fn rounded_references_pass() {
        for case in all().into_iter().filter(|c| c.size == Size::Small) {
            for d in [F32, BF16] {
                let p = Prepared::new(&case, d);
                let report = p.judge(&ideal(&p));
                assert!(report.ok(), "{}: {report}", case.id());
            }
        }
    }

    #[test]
    fn codes_and_scales_are_compared() {
        let id = "rope_kv/pages in 8 bits, decode of 8 rows";
        let spoiled = |first: fn(&Want) -> bool, spoil: fn(&mut [u8])| {
            spoiled(id, "k_pages", |a, p, got| {
                let (_, want) = p.wants.iter().find(|(name, _)| *name == "k_pages").unwrap();
                spoil(&mut got[a.at(want.iter().position(first).unwrap()).start..]);
            })
        };
        assert!(!spoiled(|w| matches!(w, Want::Code(v) if v.abs() < 100.0), |b| b[0] = b[0].wrapping_add(2)).ok());
        assert!(!spoiled(|w| matches!(w, Want::Scale(_)), |b| b[2] ^= 8).ok());
    }

    #[test]
    fn an_op_that_does_nothing_fails() {
        for case in all().into_iter().filter(|c| c.size == Size::Small) {
            let p = Prepared::new(&case, F32);
            let idle = p.wants.iter().all(|(_, w)| w.iter().all(|w| matches!(w, Want::Keep | Want::Any)));
            assert_eq!(p.judge(&p.images).ok(), idle, "{}", case.id());
        }
    }

    #[test]
    fn states_are_compared_slot_by_slot() {
        for op in ["conv1d", "selective_scan", "gated_delta"] {
            let id = format!("{op}/rows of many lengths");
            let p = Prepared::new(&find(&id), F32);
            let len: usize = p.host.array("pool").dims[1..].iter().product();
            let dsts: Vec<usize> =
                (0..p.wants[1].1.len() / len).filter(|s| p.wants[1].1[s * len] != Want::Keep).collect();
            assert_eq!(dsts, [1, 3, 5, 6, 7, 8, 9, 10, 11]);
            for &slot in &dsts {
                let missing = spoiled(&id, "pool", |a, p, got| {
                    (slot * len..(slot + 1) * len)
                        .for_each(|i| got[a.at(i)].copy_from_slice(&p.images[a.buf][a.at(i)]));
                });
                assert!(!missing.ok(), "{id}: slot {slot} was not written");
                let wrong = spoiled(&id, "pool", |a, _, got| a.set(slot * len, 1.0 + a.read(slot * len, got), got));
                assert!(!wrong.ok(), "{id}: slot {slot} is wrong");
            }
            // Written to another slot than requested, to slot 0, to an unused slot, or to a src that must be kept.
            for slot in [0, 2, 4, 12] {
                let other = spoiled(&id, "pool", |a, _, got| a.set(slot * len + 1, 0.5, got));
                assert!(!other.ok(), "{id}: slot {slot} was written");
            }
        }
    }

    #[test]
    fn padding_guards_and_gaps_are_watched() {
        let p = Prepared::new(&find("conv1d/padding"), F32);
        let a = p.host.array("out");
        let last: usize = a.dims.iter().product::<usize>() - 1;
        let not_zero = spoiled("conv1d/padding", "out", |a, _, got| a.set(last, 1e-6, got));
        assert_eq!(not_zero.failures.len(), 1);
        let untouched = spoiled("conv1d/padding", "out", |a, p, got| {
            got[a.at(last)].copy_from_slice(&p.images[a.buf][a.at(last)]);
        });
        assert!(!untouched.ok());
        let written = spoiled("attention/padding", "out", |a, _, got| {
            let last = a.dims.iter().product::<usize>() - 1;
            a.set(last, 0.0, got);
        });
        assert!(!written.ok());
        let guard = spoiled("conv1d/base", "out", |_, _, got| *got.last_mut().expect("bytes") = 0);
        assert!(!guard.ok());
        let gap = spoiled("conv1d/columns of wider matrices", "out", |a, _, got| got[a.at(23).end] = 0);
        assert!(!gap.ok());
        let input = spoiled("conv1d/base", "x", |a, _, got| a.set(3, 0.0, got));
        assert!(!input.ok());
        let page = spoiled("rope_kv/base", "k_pages", |a, _, got| a.set(0, 1.0, got));
        assert!(!page.ok());
    }

    #[test]
    fn a_wrong_number_fails() {
        for id in ["matmul/base", "attention/base", "rms_norm/base", "activation/base", "expert_matmul/up, base"] {
            let report = spoiled(id, "out", |a, _, got| a.set(2, 1.001 * a.read(2, got) + 0.001, got));
            assert!(!report.ok(), "{id}");
            let report = spoiled(id, "out", |a, _, got| a.set(2, f64::NAN, got));
            assert!(!report.ok(), "{id}");
        }
        let report = spoiled("route/sigmoid", "ids", |a, _, got| a.set(2, a.read(2, got) + 1.0, got));
        assert!(!report.ok());
        let report = spoiled("sample/greedy", "seen", |a, _, got| a.set(0, 1.0 - a.read(0, got).min(1.0), got));
        assert!(!report.ok());
    }
}
