// The op cases against the CPU reference, in the browser: every shader that it may pick is compiled and run there.

import assert from "node:assert/strict";
import { join } from "node:path";
import { test } from "node:test";
import { ROOT, blank, profile, serve } from "./harness.mjs";

const site = await serve();

// A page where `cases` and, once opened, `ops` are those of the wasm module.
async function opened(backend) {
  const { context, errors } = await profile();
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

for (const backend of ["cpu", "wgpu", "wgpu-hardware"]) {
  test(`ops on ${backend}`, async (t) => {
    const { context, page, errors } = await opened(backend);
    const results = await page.evaluate(async () => {
      const results = [];
      for (const [i] of cases.entries()) results.push(JSON.parse(await ops.run(i)));
      results.push(...JSON.parse(await ops.chains()));
      await ops.settle();
      return results;
    });
    const pipelines = Math.max(0, ...results.map(({ pipelines }) => pipelines ?? 0));
    t.diagnostic(`${results.length} cases, ${pipelines} pipelines`);
    assert.ok(results.length > 0);
    const failed = results.filter(({ ok }) => !ok).map(({ id, failures }) => `${id}: ${failures.join("; ")}`);
    assert.deepEqual(failed, []);
    assert.deepEqual(errors, []);
    await context.close();
  });
}

test("vectors of 128 bits give the bits of plain code", async () => {
  const { context, page } = await opened("cpu");
  assert.match(await page.evaluate(() => module.isas()), /^simd128/);
  assert.equal(await page.evaluate(() => module.simdDifference() ?? null), null);
  await context.close();
});
