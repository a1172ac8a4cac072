"""The Python module, on the CPU with the demo model: `python -m unittest discover python/tests`."""

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import selkie

QUESTION = "What is 17 + 25?"
ANSWER = "17 + 25 = 42."
STORY = "Tell me a story about a fox named Leo and a lantern."


class Tests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.seen = []
        cls.model = selkie.load(device="cpu", max_batch=8, progress=lambda done, total: cls.seen.append((done, total)))

    def test_answers(self):
        done = self.model.generate(QUESTION)
        self.assertEqual((done.text, done.finish, str(done)), (ANSWER, "stop", ANSWER))
        self.assertEqual(self.model.generate([{"role": "user", "content": QUESTION}]).ids, done.ids)
        self.assertEqual(self.model.facts["backend"], "cpu")
        self.assertIn("demo", repr(self.model))
        self.assertEqual(self.seen[-1][0], self.seen[-1][1])

    def test_ids_and_raw_text(self):
        ids = self.model.tokenize("Once upon")
        self.assertEqual(self.model.detokenize(ids), "Once upon")
        raw = self.model.generate("Once upon", raw=True, max_tokens=8)
        self.assertEqual(self.model.generate(ids, max_tokens=8).ids, raw.ids)
        self.assertEqual(raw.finish, "length")
        self.assertEqual(self.model.generate(QUESTION, stop="=").text, "17 + 25 ")

    def test_streams(self):
        stream = self.model.stream(STORY, max_tokens=40)
        pieces = list(stream)
        self.assertGreater(len(pieces), 10)
        self.assertEqual("".join(pieces), stream.completion.text)
        self.assertEqual(list(stream), [])

    def test_reuse_and_namespaces(self):
        first = self.model.generate(STORY, system="Be brief. " * 40, max_tokens=1, namespace="a")
        again = self.model.generate(STORY, system="Be brief. " * 40, max_tokens=1, namespace="a")
        other = self.model.generate(STORY, system="Be brief. " * 40, max_tokens=1, namespace="b")
        self.assertEqual((first.reused, other.reused), (0, 0))
        self.assertGreaterEqual(again.reused, 64)
        self.assertEqual((first.ids, again.ids), (again.ids, other.ids))
        self.assertIsNotNone(first.reason)

    def test_chat(self):
        chat = self.model.chat(system="Your name is Iris.", max_tokens=20)
        chat.ask(QUESTION).read()
        self.assertEqual([m["role"] for m in chat.messages], ["system", "user", "assistant"])
        text = "".join(chat.ask("And 2 + 2?", max_tokens=10))
        self.assertEqual(chat.messages[-1], {"role": "assistant", "content": text})

    def test_batch(self):
        prompts = [QUESTION, {"prompt": STORY, "max_tokens": 3}, STORY]
        alone = [self.model.generate(STORY, max_tokens=n).ids for n in (3, 60)]
        answers = dict(self.model.batch(prompts, max_tokens=60))
        self.assertEqual(answers[0].text, ANSWER)
        self.assertEqual([answers[1].ids, answers[2].ids], alone)

    def test_asyncio(self):
        async def main():
            stream = self.model.stream(STORY, max_tokens=30)
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)

            ticking = asyncio.create_task(tick())
            text = "".join([piece async for piece in stream])
            ticking.cancel()
            many = await asyncio.gather(*(self.model.generate_async(QUESTION) for _ in range(20)))
            batch = {index: done.text async for index, done in self.model.batch([QUESTION] * 5)}
            return text, ticks, {done.text for done in many}, batch

        text, ticks, many, batch = asyncio.run(main())
        self.assertEqual(text, self.model.generate(STORY, max_tokens=30).text)
        self.assertGreater(ticks, 30)
        self.assertEqual((many, batch), ({ANSWER}, {i: ANSWER for i in range(5)}))

    def test_the_interpreter_is_free_meanwhile(self):
        turns, end = 0, threading.Event()

        def count():
            nonlocal turns
            while not end.is_set():
                turns += 1
                time.sleep(0.001)

        counting = threading.Thread(target=count)
        counting.start()
        start = time.monotonic()
        self.model.generate(STORY, max_tokens=150)
        seconds = time.monotonic() - start
        end.set()
        counting.join()
        # A wait that held the lock would stop the other thread altogether.
        self.assertGreater(turns, 5 if seconds > 0.05 else 0)

    def test_a_lost_stream_is_cancelled(self):
        stream = self.model.stream(STORY, max_tokens=1000)
        next(stream)
        del stream
        deadline = time.monotonic() + 10
        while self.model.stats()["running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual(self.model.stats()["running"], 0)
        with self.model.stream(STORY, max_tokens=1000) as stream:
            next(stream)
        self.assertEqual(stream.read().finish, "cancelled")

    def test_states_are_saved_and_loaded(self):
        talk = [{"role": "system", "content": "You tell long stories. " * 20}, {"role": "user", "content": STORY}]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "story.bundle"
            tokens = self.model.save_state(file, talk)
            self.assertGreaterEqual(tokens, 64)
            self.assertEqual(file.stat().st_mode & 0o777, 0o600)
            other = selkie.load(device="cpu")
            self.assertEqual(other.load_state(file), tokens)
            alone = other.generate(talk, max_tokens=40, namespace="another")
            restored = other.generate(talk, max_tokens=40)
            self.assertEqual((restored.ids, restored.reused, alone.reused), (alone.ids, tokens, 0))
            data = bytearray(file.read_bytes())
            data[-9] ^= 1
            file.write_bytes(data)
            with self.assertRaisesRegex(Exception, "story.bundle"):
                other.load_state(file)
            with self.assertRaises(OSError):
                other.load_state(Path(folder) / "none")

    def test_errors(self):
        for options in ({"temperature": -1.0}, {"top_p": 2.0}, {"when_full": "never"}, {"stop": [""]}):
            with self.assertRaises(ValueError, msg=options):
                self.model.generate(QUESTION, **options)
        with self.assertRaises(ValueError):
            self.model.generate([{"role": "user", "text": "x"}])
        with self.assertRaises(TypeError):
            self.model.generate(QUESTION, max_token=3)
        with self.assertRaises(ValueError):
            self.model.generate([4_000_000_000])
        with self.assertRaisesRegex(ValueError, "cuda"):
            selkie.load(device="gpu")
        with tempfile.TemporaryDirectory() as empty, self.assertRaisesRegex(selkie.SelkieError, "config.json"):
            selkie.load(empty)

    def test_ctrl_c(self):
        program = (
            "import selkie, signal, sys\n"
            # A shell starts background jobs with the signal ignored.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "model = selkie.load(device='cpu')\n"
            "print('ready', flush=True)\n"
            "while True: model.generate('Tell me a long story.', max_tokens=900, temperature=1.0)\n"
        )
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual(child.stdout.readline(), b"ready\n")
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=10)
        self.assertIn(b"KeyboardInterrupt", stderr)

    def test_command_line(self):
        run = subprocess.run([sys.executable, "-m", "selkie", "-q", QUESTION], stdin=subprocess.DEVNULL, capture_output=True, check=True)
        self.assertEqual(run.stdout.decode().strip(), ANSWER)
        self.assertEqual(subprocess.run([sys.executable, "-m", "selkie", "--no-such-option"], capture_output=True).returncode, 2)

    @unittest.skipIf(importlib.util.find_spec("numpy") is None, "numpy is not installed")
    def test_logits(self):
        ids = self.model.tokenize("Once upon a time")
        logits = selkie.logits(ids, device="cpu")
        self.assertEqual(logits.shape, (len(ids), self.model.facts["vocab"]))
        self.assertEqual(logits[-1].argmax(), self.model.generate(ids, max_tokens=1, temperature=0.0).ids[0])

    def test_stubs_name_what_there_is(self):
        stubs = (Path(selkie.__file__).parent / "__init__.pyi").read_text()
        for name in selkie.__all__:
            self.assertRegex(stubs, rf"(class|def) {name}\b")
        self.assertEqual(json.loads(json.dumps(self.model.stats())), self.model.stats())


if __name__ == "__main__":
    unittest.main()
