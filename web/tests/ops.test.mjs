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

// Runs the cases that `take` gives, some numbers at a time, in a browser of its own; the chains too if it is the first.
async function results(backend, number, take) {
  const { context, page, errors } = await opened(backend, number);
  const count = await page.evaluate(() => cases.length);
  const results = [];
  for (let some = take(count); some.length; some = take(count)) {
    results.push(...(await page.evaluate(async (some) => {
      const results = [];
      for (const i of some) results.push(ops.same(i) ? { id: cases[i], ok: true, same: true } : JSON.parse(await ops.run(i)));
      return results;
    }, some)));
  }
  if (number === 0) results.push(...(await page.evaluate(async () => JSON.parse(await ops.chains()))));
  await page.evaluate(() => ops.settle());
  assert.deepEqual(errors, []);
  await context.close();
  return results;
}

// A software device works on one core, so two browsers take half the time of one. Most of it is the shader compiler's, and
// neighbours share shaders: a browser takes several cases at a time.
const TOGETHER = 32;
for (const backend of ["cpu", "wgpu", "wgpu-hardware"]) {
  test(`ops on ${backend}`, async (t) => {
    let next = 0;
    const take = (count) => {
      const some = Array.from({ length: Math.min(TOGETHER, count - next) }, (_, i) => next + i);
      next += some.length;
      return some;
    };
    const all = (await Promise.all([0, 1].map((number) => results(backend, number, take)))).flat();
    const pipelines = Math.max(0, ...all.map(({ pipelines }) => pipelines ?? 0));
    const same = all.filter(({ same }) => same).length;
    t.diagnostic(`${all.length} cases, ${same} of them as on wgpu, at most ${pipelines} pipelines in a browser`);
    assert.ok(next > 0 && all.length > next && same < next);
    const failed = all.filter(({ ok }) => !ok).map(({ id, failures }) => `${id}: ${failures.join("; ")}`);
    assert.deepEqual(failed, []);
  });
}

test("vectors of 128 bits give the bits of plain code", async () => {
  const { context, page } = await opened("cpu");
  assert.match(await page.evaluate(() => module.isas()), /^simd128/);
  assert.equal(await page.evaluate(() => module.simdDifference() ?? null), null);
  await context.close();
});
