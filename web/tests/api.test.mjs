// The JS API on a loaded engine: generating, cancelling, errors, the cache, the end. On WebGPU, and on the CPU without it.

import assert from "node:assert/strict";
import { test } from "node:test";
import { blank, profile, serve } from "./harness.mjs";

const site = await serve();
const QUESTION = [{ role: "user", content: "What is 17 + 25?" }];
const STORY = "Tell me a story about a fox named Leo and a lantern.";

// A page with `engine` loaded from the page's own server.
async function loaded(options = {}) {
  const { context, errors } = await profile({ webgpu: options.backend !== "cpu" });
  const page = await blank(context, site.url);
  page.setDefaultTimeout(120_000);
  const info = await page.evaluate(async (options) => {
    globalThis.engine = await selkie.load({ model: { url: "/models/demo/" }, ...options });
    globalThis.ask = async (request, engine = globalThis.engine) => {
      const generation = engine.generate(request);
      let text = "";
      for await (const update of generation) if (update.type === "text") text += update.text;
      const done = await generation.done;
      if (text !== done.text) throw new Error(`streamed ${text}, but the answer is ${done.text}`);
      return done;
    };
    return engine.info;
  }, options);
  return { context, page, info, errors };
}

// A first turn of more than 80 tokens, a short answer, and what follows. The software adapter takes a second for some tokens,
// so that it gets them as a prompt.
const PROMPTS = {
  wgpu: [{ role: "system", content: "Your name is Iris. ".repeat(24) }, { role: "user", content: "What is 81 - 36?" }],
  cpu: [{ role: "user", content: STORY }],
};

for (const [backend, options] of [["wgpu", {}], ["cpu", { backend: "cpu" }]]) {
  test(`${backend}: a question, a long turn and what follows, with the cache and without`, async () => {
    const { context, page, info, errors } = await loaded(options);
    assert.equal(info.backend, backend);
    assert.equal(info.name, "demo");
    const done = await page.evaluate((messages) => ask({ messages }), QUESTION);
    assert.equal(done.text, "17 + 25 = 42.");
    assert.equal(done.finish, "stop");
    assert.equal(done.usage.promptTokens, 13);
    assert.ok(done.ttftMs > 0 && done.tokensPerSecond > 0);

    const chat = (page) => page.evaluate(async (messages) => {
      const first = await ask({ messages, maxTokens: 120 });
      messages.push({ role: "assistant", content: first.text }, { role: "user", content: "Who has the lantern?" });
      return [first, await ask({ messages, maxTokens: 16 })];
    }, PROMPTS[backend]);
    const [story, answer] = await chat(page);
    assert.ok(story.usage.promptTokens + story.usage.completionTokens >= 80, JSON.stringify(story.usage));
    assert.ok(answer.usage.reused >= 64, JSON.stringify(answer.usage));
    assert.equal(answer.usage.reused + answer.usage.computed, answer.usage.promptTokens);

    const stats = await page.evaluate(() => engine.stats());
    assert.equal(stats.backend, backend);
    assert.equal(stats.requests, 3);
    assert.ok(stats.tree.length >= 2 && stats.tree.every((node) => node.tokens % 64 === 0));
    assert.ok(stats.reusedTokens >= answer.usage.reused);
    // The weights are on the device and nowhere in the module's memory.
    if (backend === "wgpu") assert.ok(stats.wasmBytes < 2 * info.weightBytes + (24 << 20), `${stats.wasmBytes}`);

    await page.evaluate(() => engine.setPrefixCache(false));
    await page.evaluate(() => engine.clearCache());
    assert.deepEqual((await page.evaluate(() => engine.stats())).tree, []);
    const plain = await chat(page);
    assert.deepEqual(plain.map(({ text }) => text), [story.text, answer.text]);
    assert.deepEqual([plain[1].usage.reused, plain[1].usage.reason], [0, "off"]);
    assert.deepEqual(errors, []);
    await context.close();
  });

  test(`${backend}: stop at once, and again`, async (t) => {
    const { context, page } = await loaded(options);
    // Other work may delay the machine: two of three stops count.
    const middle = (times) => times.toSorted((a, b) => a - b)[1];
    const answers = await page.evaluate(async (content) => {
      const answers = [];
      for (let i = 0; i < 3; i++) {
        const generation = engine.generate({ messages: [{ role: "user", content }], maxTokens: 1000 });
        let start;
        for await (const update of generation) {
          if (update.type !== "text" || start) continue;
          start = performance.now();
          generation.cancel();
        }
        answers.push({ ms: performance.now() - start, done: await generation.done });
      }
      return answers;
    }, STORY);
    for (const { done } of answers) {
      assert.equal(done.finish, "cancelled");
      assert.ok(done.text.length > 0);
    }
    const inText = middle(answers.map(({ ms }) => ms));
    // In the middle of a prompt too, of which a machine without a GPU may take more than 200 ms for the steps in flight.
    const inPrompt = middle(await page.evaluate(async () => {
      const times = [];
      for (let i = 0; i < 3; i++) {
        const generation = engine.generate({ prompt: `${i} ${"The fox took the lantern. ".repeat(300)}`, maxTokens: 5 });
        await new Promise((resolve) => setTimeout(resolve, 50));
        const start = performance.now();
        generation.cancel();
        await generation.done;
        times.push(performance.now() - start);
      }
      return times;
    }));
    const thirtieth = await page.evaluate(async () => {
      const start = performance.now();
      await engine.generate({ prompt: `4 ${"The fox took the lantern. ".repeat(10)}`, maxTokens: 1 }).done;
      return performance.now() - start;
    });
    const facts = [inText, inPrompt, thirtieth].map(Math.round);
    t.diagnostic(`${facts[0]} ms in an answer, ${facts[1]} ms in a prompt of which a thirtieth takes ${facts[2]} ms`);
    assert.ok(Math.max(inText, inPrompt) < Math.max(200, thirtieth), `${facts} ms`);
    assert.equal((await page.evaluate((messages) => ask({ messages }), QUESTION)).text, "17 + 25 = 42.");
    await context.close();
  });
}

test("OpenAI's form: whole, streamed, with usage, cancelled, and refused by name", async () => {
  const { context, page } = await loaded({ backend: "cpu" });
  const run = (body) => page.evaluate((body) => failureOr(engine.chat.completions.create(body)), body);
  await page.evaluate(() => (globalThis.failureOr = (promise) => promise.then((value) => value, ({ code, message }) => ({ code, message }))));
  const parts = [{ role: "user", content: [{ type: "text", text: "What is " }, { type: "text", text: "17 + 25?" }] }];
  const whole = await run({ messages: parts, model: "any", stop: null, temperature: 0, user: "x" });
  assert.equal(whole.object, "chat.completion");
  assert.deepEqual(whole.choices, [{ index: 0, message: { role: "assistant", content: "17 + 25 = 42." }, logprobs: null, finish_reason: "stop" }]);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  assert.equal(whole.usage.prompt_tokens_details.cached_tokens, whole.selkie.reused);
  const short = await run({ messages: parts, max_completion_tokens: 2 });
  assert.equal(short.choices[0].finish_reason, "length");
  assert.equal((await run({ messages: parts, stop: "=" })).choices[0].message.content, "17 + 25 ");

  const streamed = await page.evaluate(async (messages) => {
    const chunks = [];
    for await (const chunk of await engine.chat.completions.create({ messages, stream: true, stream_options: { include_usage: true } })) chunks.push(chunk);
    return chunks;
  }, QUESTION);
  assert.equal(streamed[0].choices[0].delta.role, "assistant");
  assert.equal(streamed.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), "17 + 25 = 42.");
  assert.equal(streamed.at(-2).choices[0].finish_reason, "stop");
  assert.deepEqual(streamed.at(-1).choices, []);
  assert.ok(streamed.at(-1).usage.completion_tokens > 0);

  const stopped = await page.evaluate(async (content) => {
    const stream = await engine.chat.completions.create({ messages: [{ role: "user", content }], stream: true });
    try {
      for await (const chunk of stream) if (chunk.choices[0].delta.content) stream.controller.abort();
    } catch ({ code }) {
      return code;
    }
  }, STORY);
  assert.equal(stopped, "cancelled");
  assert.match((await run({ messages: QUESTION, maxtokens: 3 })).message, /no option "maxtokens"; did you mean "max_tokens"/);
  assert.match((await run({ messages: [{ role: "user", content: [{ type: "image_url" }] }] })).message, /"image_url"; only "text"/);
  assert.match((await run({ messages: QUESTION, n: 2 })).message, /n is 2/);
  await context.close();
});

test("requests side by side, a loop that is left, cancelling all", async () => {
  const { context, page } = await loaded({ backend: "cpu" });
  const texts = await page.evaluate(async () => {
    const questions = ["What is 17 + 25?", "What is 81 - 36?"].map((content) => ask({ messages: [{ role: "user", content }] }));
    return (await Promise.all(questions)).map(({ text }) => text);
  });
  assert.deepEqual(texts, ["17 + 25 = 42.", "81 - 36 = 45."]);
  const finishes = await page.evaluate(async (content) => {
    const left = engine.generate({ messages: [{ role: "user", content }] });
    for await (const update of left) if (update.type === "text") break;
    const others = [1, 2, 3].map((seed) => engine.generate({ messages: [{ role: "user", content }], temperature: 1, seed }));
    await new Promise((resolve) => setTimeout(resolve, 20));
    engine.cancel();
    return (await Promise.all([left, ...others].map((generation) => generation.done))).map(({ finish }) => finish);
  }, STORY);
  assert.deepEqual(finishes, Array(4).fill("cancelled"));
  await context.close();
});

test("requests that cannot be served say why, and do no harm", async () => {
  const { context, page } = await loaded({ backend: "cpu" });
  for (const request of [
    {}, { messages: [] }, { prompt: "" }, { prompt: "x", temperature: -1 }, { prompt: "x", topP: 7 }, { prompt: "x", maxTokens: 0 },
    { prompt: "x", stop: [""] }, { prompt: "x", seed: -1 }, { messages: "x" }, { messages: [{ role: "user" }] }, null, { prompt: 7 },
    { prompt: "word ".repeat(20_000) },
  ]) {
    const error = await page.evaluate((request) => failure(engine.generate(request).done), request);
    assert.ok(["bad_request", "bad_model"].includes(error?.code), `${JSON.stringify(request)?.slice(0, 60)}: ${JSON.stringify(error)}`);
    assert.ok(error.message.length > 8, error.message);
  }
  assert.equal((await page.evaluate((messages) => ask({ messages }), QUESTION)).text, "17 + 25 = 42.");
  const stopped = await page.evaluate((messages) => ask({ messages, stop: ["= 4"] }), QUESTION);
  assert.equal(stopped.text, "17 + 25 ");
  await context.close();
});

test("a conversation longer than the context: an error, or its oldest turns are left out", async () => {
  const { context, page } = await loaded({ backend: "cpu", contextTokens: 512 });
  const messages = [{ role: "system", content: "The code of the red box is 4812. ".repeat(10) }];
  for (let i = 0; i < 30; i++) messages.push({ role: "user", content: STORY }, { role: "assistant", content: "Once there was a fox named Leo." });
  messages.push({ role: "user", content: "What is the code of the red box?" });
  for (const whenFull of [undefined, "error"]) {
    const error = await page.evaluate((request) => failure(engine.generate(request).done), { messages, maxTokens: 20, whenFull });
    assert.equal(error?.code, "bad_request");
    assert.match(error.message, /the context holds 512/);
  }
  const done = await page.evaluate((request) => ask(request), { messages, maxTokens: 20, whenFull: "drop-oldest" });
  assert.ok(done.leftOutMessages > 0 && done.leftOutMessages < 60 && done.leftOutMessages % 2 === 0, String(done.leftOutMessages));
  assert.ok(done.usage.promptTokens <= 256, JSON.stringify(done.usage));
  assert.equal((await page.evaluate((messages) => ask({ messages, whenFull: "drop-oldest" }), QUESTION)).leftOutMessages, 0);
  const error = await page.evaluate((messages) => failure(engine.generate({ messages, whenFull: "drop" }).done), QUESTION);
  assert.match(error?.message ?? "", /drop-oldest/);
  await context.close();
});

test("options that do not exist are refused with the nearest name", async () => {
  const { context, page } = await loaded({ backend: "cpu" });
  const refusals = await page.evaluate(() => Promise.all([
    engine.generate({ prompt: "x", max_tokens: 3 }).done,
    engine.generate({ prompt: "x", temprature: 0 }).done,
    engine.generate({ prompt: "x", stream: true }).done,
    engine.generate("x").done,
    selkie.load(),
    selkie.load(null),
    selkie.load({ model: { url: "/models/demo/" }, onprogress() {} }),
    selkie.inspect({ url: "/models/demo/" }, { beckend: "cpu" }),
  ].map(failure)));
  const messages = ['"max_tokens"; did you mean "maxTokens"', 'did you mean "temperature"', '"stream"; there are messages, prompt', "takes an object",
    "A model is { url }", "takes an object", 'did you mean "onProgress"', 'did you mean "backend"'];
  for (const [i, error] of refusals.entries()) {
    assert.equal(error?.code, "bad_request", JSON.stringify(error));
    assert.ok(error.message.includes(messages[i]), error.message);
  }
  const known = await page.evaluate((messages) => ask({ messages, maxTokens: undefined, temperature: 0, stop: ["= 4"] }), QUESTION);
  assert.equal(known.text, "17 + 25 ");
  await context.close();
});

test("closing an engine ends what runs", async () => {
  const { context, page } = await loaded({ backend: "cpu" });
  const errors = await page.evaluate(async (content) => {
    const running = engine.generate({ messages: [{ role: "user", content }] });
    const looping = (async () => {
      for await (const _ of running);
    })();
    engine.close();
    return Promise.all([running.done, looping, engine.stats(), engine.generate({ prompt: "x" }).done].map(failure));
  }, STORY);
  assert.deepEqual(errors.map((error) => error?.code), Array(4).fill("cancelled"));
  for (const { message } of errors) assert.equal(message, "The engine was closed.");
  await context.close();
});

test("WebGPU by name does not fall back", async () => {
  const { context } = await profile({ webgpu: false });
  const page = await blank(context, site.url);
  const error = await page.evaluate(() => failure(selkie.load({ model: { url: "/models/demo/" }, backend: "wgpu" })));
  assert.equal(error.code, "unsupported", error.message);
  const info = await page.evaluate(async () => (await selkie.load({ model: { url: "/models/demo/" } })).info);
  assert.equal(info.backend, "cpu");
  assert.match(info.fallback, /WebGPU/);
  await context.close();
});

test("a lost GPU is told, and the CPU goes on", async () => {
  const { context } = await profile();
  // The worker exposes its device, so that a test can end it as a driver restart does.
  await context.route("**/js/worker.js", async (route) => {
    const response = await route.fetch();
    const trap = `const request = GPUAdapter.prototype.requestDevice;
      GPUAdapter.prototype.requestDevice = async function (...args) { return (self.device = await request.apply(this, args)); };\n`;
    await route.fulfill({ response, body: (await response.text()).replace(/^(import [^;]*;\n)+/m, (imports) => imports + trap) });
  });
  const page = await blank(context, site.url);
  const worker = page.waitForEvent("worker");
  await page.evaluate(async () => {
    globalThis.engine = await selkie.load({ model: { url: "/models/demo/" } });
  });
  const running = page.evaluate((content) => failure(engine.generate({ messages: [{ role: "user", content }] }).done), STORY);
  await (await worker).evaluate(() => self.device.destroy());
  const error = await running;
  assert.equal(error.code, "device_lost", error.message);
  assert.equal(await page.evaluate(async () => (await engine.failed).code), "device_lost");
  const info = await page.evaluate(async () => (await selkie.load({ model: { url: "/models/demo/" }, backend: "cpu" })).info);
  assert.deepEqual([info.backend, info.from], ["cpu", "storage"]);
  await context.close();
});
