// The op cases against the CPU reference, in the browser: every shader that it may pick is compiled and run there.

import assert from "node:assert/strict";
import { join } from "node:path";
import { test } from "node:test";
import { ROOT, blank, profile, serve } from "./harness.mjs";

const site = await serve();

// A page where `cases` and, once opened, `ops` are those of the wasm module.
async function opened(backend, number = 0) {
  const { context, errors } = await profile({ number });
  const page = await blank(context, site.url);
  page.setDefaultTimeout(600_000);
  await page.route("**/ops/*", (route) => route.fulfill({ path: join(ROOT, "web/dist-ops", new URL(route.request().url()).pathname.slice(5)) }));
  await page.evaluate(async (backend) => {
    const module = await import("/ops/selkie_ops.js");
    await module.default();
    Object.assign(globalThis, { module, cases: JSON.parse(module.list()), ops: await module.Ops.open(backend) });
  }, backend);
  return { context, page, errors };
}

// A software device spends most of its time compiling shaders, on one core. So two browsers share the cases, and nearly every
// shader is compiled in one of them only. A case goes to the browser that lacks fewer of its shaders, unless that one has compiled
// more by FAIR for each shader that the other lacks.
const FAIR = 10;
function halves(cases) {
  const browsers = [0, 1].map(() => ({ numbers: [], compiled: new Set() }));
  for (const { number, shaders } of cases) {
    const costs = browsers.map(({ compiled }) => compiled.size + FAIR * shaders.filter((name) => !compiled.has(name)).length);
    const [a, b] = browsers;
    const taker = costs[0] < costs[1] || (costs[0] === costs[1] && a.numbers.length < b.numbers.length) ? a : b;
    taker.numbers.push(number);
    for (const name of shaders) taker.compiled.add(name);
  }
  return browsers.map(({ numbers }) => numbers);
}

// Runs one half of the cases in a browser of its own; the first half's browser also runs the chains. Returns the ids of all cases, the
// ids of those that run on `wgpu` only, and the reports of the rest.
async function results(backend, half) {
  const { context, page, errors } = await opened(backend, half);
  const all = await page.evaluate(() => cases.map((id, number) => ({ id, number, same: ops.same(number), shaders: ops.shaders(number) })));
  const mine = halves(all.filter(({ same }) => !same))[half];
  const reports = await page.evaluate(async (mine) => {
    const reports = [];
    for (const number of mine) reports.push(JSON.parse(await ops.run(number)));
    return reports;
  }, mine);
  const chains = half === 0 ? await page.evaluate(async () => JSON.parse(await ops.chains())) : [];
  await page.evaluate(() => ops.settle());
  assert.deepEqual(errors, []);
  await context.close();
  return { all: all.map(({ id }) => id), same: all.filter(({ same }) => same).map(({ id }) => id), reports, chains };
}

for (const backend of ["cpu", "wgpu", "wgpu-hardware"]) {
  test(`ops on ${backend}`, async (t) => {
    const [a, b] = await Promise.all([0, 1].map((half) => results(backend, half)));
    const pipelines = [a, b].map(({ reports }) => reports.at(-1).pipelines);
    t.diagnostic(`${a.all.length} cases, ${a.same.length} of them as on wgpu; pipelines of the browsers: ${pipelines.join(" and ")}`);
    const run = [...a.reports, ...b.reports];
    assert.ok(run.length > 0 && a.chains.length > 0);
    assert.deepEqual([...a.same, ...run.map(({ id }) => id)].sort(), a.all.sort());
    const failed = [...run, ...a.chains].filter(({ ok }) => !ok).map(({ id, failures }) => `${id}: ${failures.join("; ")}`);
    assert.deepEqual(failed, []);
  });
}

test("vectors of 128 bits give the bits of plain code", async () => {
  const { context, page } = await opened("cpu");
  assert.match(await page.evaluate(() => module.isas()), /^simd128/);
  assert.equal(await page.evaluate(() => module.simdDifference() ?? null), null);
  await context.close();
});
