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

// What a part of the cases gives, in a browser of its own: case `i` is in part `i % parts`, and the chains are in part 0.
async function results(backend, part, parts) {
  const { context, page, errors } = await opened(backend, part);
  const results = await page.evaluate(async ([part, parts]) => {
    const results = [];
    for (const [i] of cases.entries()) if (i % parts === part) results.push(JSON.parse(await ops.run(i)));
    if (part === 0) results.push(...JSON.parse(await ops.chains()));
    await ops.settle();
    return results;
  }, [part, parts]);
  assert.deepEqual(errors, []);
  await context.close();
  return results;
}

// A software device works on one core, so two browsers take half the time of one.
for (const backend of ["cpu", "wgpu", "wgpu-hardware"]) {
  test(`ops on ${backend}`, async (t) => {
    const all = (await Promise.all([0, 1].map((part) => results(backend, part, 2)))).flat();
    const pipelines = Math.max(0, ...all.map(({ pipelines }) => pipelines ?? 0));
    t.diagnostic(`${all.length} cases, at most ${pipelines} pipelines in a browser`);
    assert.ok(all.length > 0);
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
