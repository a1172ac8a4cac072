//! The promise of the CPU backend: any split of the same tokens into rows, chunks and steps gives the same bits.

use std::sync::Arc;

use proptest::prelude::*;

use super::{Buf, CpuBackend};
use crate::backend::{Backend, Ops};
use crate::ops::{Act, Attention, Conv1d, GatedDelta, KvPool, Op, RopeKv, ScanForm, SelectiveScan};
use crate::step::{Chunk, PAGE, Row, Src, Step, TokenRef, bucket_of, encode};
use crate::tensor::{DType, Tensor};

/// A size below `below`, or one that has a kernel of its own.
fn size(below: usize, tuned: &'static [usize]) -> impl Strategy<Value = usize> {
    prop_oneof![1..below, proptest::sample::select(tuned)]
}

/// A small generator; the tests' only source of numbers.
struct Rng(u64);

impl Rng {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next(4001) as f32 / 2000.0 - 1.0).collect()
    }
}

fn upload(b: &CpuBackend, x: &[f32], dims: &[usize]) -> Tensor<Buf> {
    let buf = b.alloc("test", 4 * x.len() as u64).unwrap();
    b.write(&buf, 0, bytemuck::cast_slice(x)).unwrap();
    Tensor::new(buf, DType::F32, dims)
}

/// Inputs of these widths side by side in one buffer, as a projection leaves them.
fn upload_columns(b: &CpuBackend, inputs: &[Vec<f32>], widths: &[usize], tokens: usize) -> Vec<Tensor<Buf>> {
    let mut packed = Vec::new();
    for t in 0..tokens {
        for (input, width) in inputs.iter().zip(widths) {
            packed.extend(&input[t * width..(t + 1) * width]);
        }
    }
    let all = upload(b, &packed, &[tokens, widths.iter().sum()]);
    let mut at = 0;
    let column = |width: &usize| {
        at += width;
        all.cols(at - width, *width)
    };
    widths.iter().map(column).collect()
}

fn download(b: &CpuBackend, t: &Tensor<Buf>) -> Vec<f32> {
    let bytes = pollster::block_on(b.read(t)).unwrap();
    bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

fn upload_step(b: &CpuBackend, rows: &[Row]) -> Step<Buf> {
    let bucket = bucket_of(rows);
    let words = encode(rows, bucket);
    let buf = b.alloc("step", 4 * words.len() as u64).unwrap();
    b.write(&buf, 0, bytemuck::cast_slice(&words)).unwrap();
    Step::new(buf, bucket)
}

/// Tokens per sequence of one step: (sequence, lengths of its chunks).
type Share = (usize, Vec<usize>);

/// Cuts sequences of these lengths into steps at random.
fn random_plan(rng: &mut Rng, lens: &[usize]) -> Vec<Vec<Share>> {
    let mut done = vec![0; lens.len()];
    let mut plan = Vec::new();
    while done.iter().zip(lens).any(|(d, l)| d < l) {
        let mut step = Vec::new();
        for s in 0..lens.len() {
            if done[s] == lens[s] || rng.next(3) == 0 {
                continue;
            }
            let mut chunks = Vec::new();
            for _ in 0..=rng.next(4) {
                let to_grid = PAGE - done[s] % PAGE;
                let most = to_grid.min(lens[s] - done[s]);
                if most == 0 {
                    break;
                }
                let len = if rng.next(2) == 0 { most } else { 1 + rng.next(most) };
                chunks.push(len);
                done[s] += len;
            }
            step.push((s, chunks));
        }
        if !step.is_empty() {
            plan.push(step);
        }
    }
    plan
}

/// Every token in a step of its own.
fn token_by_token(lens: &[usize]) -> Vec<Vec<Share>> {
    (0..lens.len()).flat_map(|s| (0..lens[s]).map(move |_| vec![(s, vec![1])])).collect()
}

/// Makes an op over a step, its inputs, the pool and the output.
type MakeOp<'a> = dyn Fn(Step<Buf>, &[Tensor<Buf>], Tensor<Buf>, Tensor<Buf>) -> Op<Buf> + 'a;

/// An op with a recurrent state, under test.
struct Recurrent<'a> {
    /// Widths of the inputs per token.
    inputs: &'a [usize],
    /// Width of the output.
    out: usize,
    /// Dims of a state.
    state: &'a [usize],
    op: &'a MakeOp<'a>,
}

/// Outputs and final states per sequence. Slots are chosen at random within the contract, slot 0 holds NaN.
fn run(
    b: &CpuBackend,
    rng: &mut Rng,
    case: &Recurrent<'_>,
    data: &[Vec<Vec<f32>>],
    plan: &[Vec<Share>],
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let slots = 2 + plan.iter().flatten().map(|(_, chunks)| chunks.len()).sum::<usize>();
    let state: usize = case.state.iter().product();
    let dims = [&[slots], case.state].concat();
    let pool = upload(b, &vec![f32::NAN; slots * state], &dims);
    let (mut cur, mut done, mut fresh) = (vec![0u32; data.len()], vec![0; data.len()], 1);
    let mut outputs = vec![Vec::new(); data.len()];
    for step in plan {
        let mut rows = Vec::new();
        for (s, lens) in step {
            let tokens = vec![TokenRef::Known(0); lens.iter().sum()];
            let mut row = Row { tokens, first_position: done[*s] as u32, ..Row::default() };
            for (i, &len) in lens.iter().enumerate() {
                let src = if i == 0 { Src::Slot(cur[*s]) } else { Src::Carry };
                let last = i + 1 == lens.len();
                let in_place = lens.len() == 1 && cur[*s] != 0 && rng.next(2) == 0;
                let dst = if in_place {
                    cur[*s]
                } else if last || rng.next(2) == 0 {
                    fresh += 1;
                    fresh
                } else {
                    0
                };
                row.chunks.push(Chunk { len: len as u32, src, dst });
                if last {
                    cur[*s] = dst;
                }
            }
            rows.push(row);
        }
        let step_ints = upload_step(b, &rows);
        let tokens = step_ints.bucket.tokens;
        let inputs = case.inputs.iter().enumerate().map(|(i, width)| {
            let mut packed = Vec::new();
            for (row, (s, _)) in rows.iter().zip(step) {
                packed.extend(&data[*s][i][done[*s] * width..(done[*s] + row.tokens.len()) * width]);
            }
            packed.resize(tokens * width, f32::NAN);
            packed
        });
        let inputs = upload_columns(b, &inputs.collect::<Vec<_>>(), case.inputs, tokens);
        let out = upload(b, &vec![f32::NAN; tokens * case.out], &[tokens, case.out]);
        b.run(|r| r.op((case.op)(step_ints, &inputs, pool.clone(), out.clone()))).unwrap();
        let out = download(b, &out);
        let mut at = 0;
        for (row, (s, _)) in rows.iter().zip(step) {
            let n = row.tokens.len() * case.out;
            outputs[*s].extend(&out[at..at + n]);
            at += n;
            done[*s] += row.tokens.len();
        }
        assert!(out[at..].iter().all(|x| *x == 0.0), "padding rows are 0");
    }
    let pool = download(b, &pool);
    let states = cur.iter().map(|c| pool[*c as usize * state..][..state].to_vec()).collect();
    (outputs, states)
}

fn same_bits(a: &[Vec<f32>], b: &[Vec<f32>]) -> bool {
    let bits = |x: &[Vec<f32>]| x.iter().flatten().map(|v| v.to_bits()).collect::<Vec<_>>();
    bits(a) == bits(b)
}

fn check(seed: u64, case: &Recurrent<'_>) {
    let b = CpuBackend::new();
    let mut rng = Rng(seed);
    let lens: Vec<usize> = (0..1 + rng.next(3)).map(|_| 1 + rng.next(150)).collect();
    let data: Vec<Vec<Vec<f32>>> =
        lens.iter().map(|n| case.inputs.iter().map(|w| rng.floats(n * w)).collect()).collect();
    let (want, want_state) = run(&b, &mut rng, case, &data, &token_by_token(&lens));
    assert!(want.iter().chain(&want_state).flatten().all(|x| x.is_finite()));
    let plan = random_plan(&mut rng, &lens);
    let (got, state) = run(&b, &mut rng, case, &data, &plan);
    assert!(same_bits(&want, &got), "outputs differ for {plan:?}");
    assert!(same_bits(&want_state, &state), "states differ for {plan:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn conv1d_does_not_depend_on_the_split(seed: u64, taps in 2usize..=5, channels in 1usize..40) {
        let b = CpuBackend::new();
        let weight = upload(&b, &Rng(seed).floats(channels * (taps + 1)), &[channels, taps + 1]);
        check(seed, &Recurrent { inputs: &[channels], out: channels, state: &[channels, taps - 1], op: &|step, i, pool, out| {
            Conv1d { step, x: i[0].clone(), weight: weight.clone(), pool, out, act: Act::Silu }.into()
        }});
    }

    #[test]
    fn selective_scan_per_head_does_not_depend_on_the_split(seed: u64, p in 1usize..9, n in size(40, &[16, 32, 64, 128, 256])) {
        let b = CpuBackend::new();
        let par = [-0.5, -8.0, -0.01, -1.0, 1.0, 0.5, -1.0, 0.0, 0.1, -2.0, 3.0, 0.0];
        let par = upload(&b, &par, &[3, 4]);
        check(seed, &Recurrent { inputs: &[4 * p, 2 * n, 2 * n, 4], out: 4 * p, state: &[4, p, n], op: &|step, i, pool, y| {
            let [x, b, c, dt] = [0, 1, 2, 3].map(|j| i[j].clone());
            let (par, dt_limit) = (par.clone(), (0.0, f32::INFINITY));
            SelectiveScan { step, x, b, c, dt, par, pool, y, form: ScanForm::PerHead, heads_per_group: 2, first_head: 0, dt_limit }.into()
        }});
    }

    #[test]
    fn selective_scan_per_channel_does_not_depend_on_the_split(seed: u64, h in 1usize..40, n in 1usize..20) {
        let b = CpuBackend::new();
        let par: Vec<f32> = Rng(seed).floats((n + 2) * h).iter().map(|x| x - 1.0).collect();
        let par = upload(&b, &par, &[n + 2, h]);
        check(seed, &Recurrent { inputs: &[h, n, n, h], out: h, state: &[h, 1, n], op: &|step, i, pool, y| {
            let [x, b, c, dt] = [0, 1, 2, 3].map(|j| i[j].clone());
            let (par, dt_limit) = (par.clone(), (0.0, f32::INFINITY));
            SelectiveScan { step, x, b, c, dt, par, pool, y, form: ScanForm::PerChannel, heads_per_group: h, first_head: 0, dt_limit }.into()
        }});
    }

    #[test]
    fn gated_delta_does_not_depend_on_the_split(seed: u64, dk in 1usize..20, dv in size(40, &[32, 64])) {
        let b = CpuBackend::new();
        let par = upload(&b, &[-0.5, -8.0, -0.01, -1.0, -1.0, 0.5, 2.0, 0.0], &[2, 4]);
        check(seed, &Recurrent { inputs: &[2 * dk, 2 * dk, 4 * dv, 4, 4], out: 4 * dv, state: &[4, dk, dv], op: &|step, i, pool, out| {
            let [q, k, v, a, b] = [0, 1, 2, 3, 4].map(|j| i[j].clone());
            GatedDelta { step, q, k, v, a, b, par: par.clone(), pool, out, heads_per_key: 2, first_head: 0, beta_scale: 2.0 }.into()
        }});
    }

    #[test]
    fn attention_does_not_depend_on_the_split(seed: u64, hd in size(20, &[32, 40]), window in proptest::option::of(1u32..100)) {
        let b = CpuBackend::new();
        let mut rng = Rng(seed);
        let (hd, heads, kv_heads) = (2 * hd, 4, 2);
        let lens: Vec<usize> = (0..1 + rng.next(3)).map(|_| 1 + rng.next(150)).collect();
        let widths = [heads * hd, kv_heads * hd, kv_heads * hd];
        let data: Vec<Vec<Vec<f32>>> = lens.iter().map(|n| widths.iter().map(|w| rng.floats(n * w)).collect()).collect();
        let freq = upload(&b, &[1.0], &[1]);
        let run = |plan: &[Vec<Share>]| {
            let page = kv_heads * PAGE * hd;
            let pool = || upload(&b, &vec![f32::NAN; 16 * page], &[16, kv_heads, PAGE, hd]);
            let pool = KvPool { k: pool(), v: pool() };
            let mut done = vec![0; lens.len()];
            let mut outputs = vec![Vec::<f32>::new(); lens.len()];
            for step in plan {
                let rows: Vec<Row> = step.iter().map(|(s, chunks)| {
                    let n: usize = chunks.iter().sum();
                    let page = |i: usize| (1 + i * lens.len() + s) as u32;
                    let pages = Arc::new((0..(done[*s] + n).div_ceil(PAGE)).map(page).collect());
                    let tokens = vec![TokenRef::Known(0); n];
                    Row { tokens, first_position: done[*s] as u32, pages, ..Row::default() }
                }).collect();
                let ints = upload_step(&b, &rows);
                let tokens = ints.bucket.tokens;
                let inputs = [0, 1, 2].map(|i| {
                    let mut packed = Vec::new();
                    for (row, (s, _)) in rows.iter().zip(step) {
                        packed.extend(&data[*s][i][done[*s] * widths[i]..(done[*s] + row.tokens.len()) * widths[i]]);
                    }
                    packed.resize(tokens * widths[i], f32::NAN);
                    packed
                });
                let [q, k, v] = upload_columns(&b, &inputs, &widths, tokens).try_into().unwrap();
                let blank = || upload(&b, &vec![f32::NAN; tokens * widths[0]], &[tokens, widths[0]]);
                let (q_out, out) = (blank(), blank());
                b.run(|r| {
                    let (pool, inv_freq) = (pool.clone(), Some(freq.clone()));
                    r.op(RopeKv { step: ints.clone(), q, k, v, norm: None, inv_freq, q_out: q_out.clone(), pool: pool.clone(), head_dim: hd }.into())?;
                    r.op(Attention { step: ints.clone(), q: q_out, pool, out: out.clone(), head_dim: hd, scale: 0.3, window, first: 0 }.into())
                }).unwrap();
                let out = download(&b, &out);
                let mut at = 0;
                for (row, (s, _)) in rows.iter().zip(step) {
                    let n = row.tokens.len() * widths[0];
                    outputs[*s].extend(&out[at..at + n]);
                    at += n;
                    done[*s] += row.tokens.len();
                }
                assert!(out[at..].iter().all(|x| x.is_nan()), "padding rows are not written");
            }
            outputs
        };
        let want = run(&token_by_token(&lens));
        prop_assert!(want.iter().flatten().all(|x| x.is_finite()));
        let plan = random_plan(&mut rng, &lens);
        prop_assert!(same_bits(&want, &run(&plan)), "outputs differ for {plan:?}");
    }
}
