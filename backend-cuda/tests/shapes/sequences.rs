//! Kernels of ops that follow one another in a step.

use super::*;

/// Kernels of both halves of Nemotron-3-Nano's experts with the activation in between, for `tokens` tokens.
pub fn expert_kernels(arch: &str, tokens: usize) -> Vec<File> {
    let mut m = Maker::new(DType::Bf16, DType::F32, Bucket::holding(tokens, 1, 1, 1, 1), true);
    let (d, inner, ids) = (2688, 1856, m.of(DType::U32, &[tokens, 6]));
    let up = experts(&mut m, 128, inner, d, &ids);
    let mid = m.act(&[tokens * 6, inner]);
    let act = Activation { gate: up.out.clone(), up: None, row_gate: None, out: mid.clone(), act: Act::Relu2 };
    let w = RowBlock::plain(m.of(DType::Bf16, &[128, d, inner]), 0);
    let (x, experts) = (mid, vec![ExpertRange { first: 0, experts: 128, blocks: vec![w] }]);
    let (combine, out) = (Some(m.f32(&[tokens, 6])), m.act(&[tokens, d]));
    let down = ExpertMatmul { x, experts, ids, combine, out, scale: 1.0, accumulate: true };
    kernels(arch, vec![up.into(), act.into(), down.into()])
}

/// Kernels of both halves of Qwen3-Next's experts as 8-bit floats with rounded inputs, for `tokens` tokens.
pub fn coded_expert_kernels(arch: &str, tokens: usize) -> Vec<File> {
    let mut m = Maker::new(DType::Bf16, DType::F32, Bucket::holding(tokens, 1, 1, 1, 1), true);
    let (e, d, inner, ids) = (512, 2048, 512, m.of(DType::U32, &[tokens, 10]));
    let mut up = experts(&mut m, e, 2 * inner, d, &ids);
    up.experts[0].blocks[0] = eights(&mut m, e, 2 * inner, d);
    let (gate, second) = (up.out.cols(0, inner), Some(up.out.cols(inner, inner)));
    let act = Activation { gate, up: second, row_gate: None, out: m.act(&[tokens * 10, inner]), act: Act::Silu };
    let rounded = m.act(act.out.dims());
    let rounds = [(m.act(&[tokens, d]), up.x.clone()), (act.out.clone(), rounded.clone())];
    let [first, then] = rounds.map(|(x, out)| Op::from(Round { x, out }));
    let range = ExpertRange { first: 0, experts: e, blocks: vec![eights(&mut m, e, d, inner)] };
    let (combine, out) = (Some(m.f32(&[tokens, 10])), m.act(&[tokens, d]));
    let down = ExpertMatmul { x: rounded, experts: vec![range], ids, combine, out, scale: 1.0, accumulate: true };
    kernels(arch, vec![first, up.into(), act.into(), then, down.into()])
}

/// Kernels of a token's routing and of a product of rounded activations after it, of other inputs.
pub fn rounding_kernels(arch: &str) -> Vec<File> {
    let mut m = Maker::new(DType::Bf16, DType::F32, Bucket::holding(1, 1, 1, 1, 1), true);
    let (step, logits, ids, weights) = (m.step.clone(), m.f32(&[1, 64]), m.of(DType::U32, &[1, 4]), m.f32(&[1, 4]));
    let route = Route { step, logits, bias: None, ids, weights, router: Router::SoftmaxTopK { renorm: true } };
    let (x, rounded, out, w) = (m.act(&[1, 512]), m.act(&[1, 512]), m.act(&[1, 256]), m.codes(Format::F8, 256, 512));
    let round = Round { x, out: rounded.clone() };
    let product =
        Matmul { x: rounded, w, columns: None, bias: None, out, scale: 1.0, accumulate: false, precise: false };
    kernels(arch, vec![route.into(), round.into(), product.into()])
}

/// Kernels of Kimi-Linear's mixture with its shared expert, and of the two projections of narrow inputs in its recurrence, for `tokens`
/// tokens.
pub fn mixture_kernels(arch: &str, tokens: usize) -> [Vec<File>; 2] {
    let mut m = Maker::new(DType::Bf16, DType::F32, Bucket::holding(tokens, 1, 1, 1, 1), true);
    let (t, d, e, top, inner) = (tokens, 2304, 256, 8, 1024);
    let product = |m: &mut Maker, x: &Tensor<Fake>, out: &Tensor<Fake>, accumulate: bool| {
        let w = m.weight(DType::Bf16, out.row_len(), x.row_len());
        Op::from(Matmul {
            x: x.clone(),
            w,
            columns: None,
            bias: None,
            out: out.clone(),
            scale: 1.0,
            accumulate,
            precise: false,
        })
    };
    let gated = |m: &mut Maker, both: &Tensor<Fake>| {
        let (gate, up, out) = (both.cols(0, inner), Some(both.cols(inner, inner)), m.act(&[both.rows(), inner]));
        Activation { gate, up, row_gate: None, out, act: Act::Silu }
    };
    let (x, u, logits, both) = (m.act(&[t, d]), m.act(&[t, d]), m.f32(&[t, e]), m.act(&[t, 2 * inner]));
    let (weight, ids, weights) = (m.f32(&[d]), m.of(DType::U32, &[t, top]), m.f32(&[t, top]));
    let (add, gate, out, accumulate, groups) = (None, None, u.clone(), false, 1);
    let norm = RmsNorm { x: x.clone(), add, weight, gate, out, accumulate, eps: 1e-5, groups };
    let [router, shared] = [&logits, &both].map(|out| product(&mut m, &u, out, false));
    let then = gated(&mut m, &both);
    let down = product(&mut m, &then.out, &x, true);
    let (step, bias) = (m.step.clone(), Some(m.f32(&[e])));
    let rule = Router::Sigmoid { groups: 1, topk_group: 1, renorm: true, sum_eps: 1e-20, scale: 2.446 };
    let (ids_of, combine) = (ids.clone(), Some(weights.clone()));
    let route = Route { step, logits, bias, ids: ids_of, weights, router: rule };
    let up = ExpertMatmul { x: u, ..experts(&mut m, e, 2 * inner, d, &ids) };
    let act = gated(&mut m, &up.out);
    let second =
        ExpertMatmul { x: act.out.clone(), combine, out: x, accumulate: true, ..experts(&mut m, e, d, inner, &ids) };
    let layer = [norm.into(), router, shared, then.into(), down];
    let chosen = [route.into(), up.into(), act.into(), second.into()];
    let (narrow, outs) = (m.act(&[t, 2 * 128]), [m.act(&[t, 4096]), m.act(&[t, 4096])]);
    let [f, g] = [0, 1].map(|i| product(&mut m, &narrow.cols(128 * i, 128), &outs[i], false));
    [kernels(arch, layer.into_iter().chain(chosen).collect()), kernels(arch, vec![f, g])]
}

/// Kernels of ops that follow one another in a step.
fn kernels(arch: &str, ops: Vec<Op<Fake>>) -> Vec<File> {
    let mut files = Vec::new();
    let mut sequencer = Sequencer::new(device(arch, 227 << 10, true));
    let arena = &mut |_: u64| Ok(ARENA);
    let emit = &mut |planned: Planned<Fake>| {
        files.extend(planned.work.iter().filter_map(|w| match w {
            Work::Kernel(l) => Some(l.spec.file()),
            Work::Gemm(_) => None,
        }));
        Ok(())
    };
    for op in ops {
        sequencer.push(op, arena, emit).expect("a shape of a supported model");
    }
    sequencer.finish(arena, emit).expect("a shape of a supported model");
    files
}
