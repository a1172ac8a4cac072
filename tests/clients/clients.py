"""The official clients of OpenAI, Anthropic and LangChain against `selkie serve` with the demo model.

SELKIE_BIN names the program. Packages: pip install -r requirements.txt
"""

import asyncio
import os
import subprocess
import unittest

import anthropic
import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI as LangChainCompletion

QUESTION = "What is 17 + 25?"
ANSWER = "17 + 25 = 42."
MESSAGES = [{"role": "user", "content": QUESTION}]
BIN = os.environ.get("SELKIE_BIN", "target/release/selkie")


def setUpModule():
    global server, url
    command = [BIN, "serve", "--port", "0", "--backend", "cpu"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = server.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), url
    # Its own retries wait until the model is loaded.
    openai.OpenAI(base_url=url + "v1", api_key="any", max_retries=10).models.list()


def tearDownModule():
    server.terminate()
    code = server.wait(30)
    server.stdout.close()
    assert code == 0, code


class OpenAI(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(base_url=url + "v1", api_key="any", max_retries=5)
        self.addCleanup(self.client.close)

    def test_chat(self):
        answer = self.client.chat.completions.create(model="demo", messages=MESSAGES)
        self.assertEqual(answer.choices[0].message.content, ANSWER)
        self.assertEqual(answer.choices[0].finish_reason, "stop")
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
        self.assertEqual(answer.usage.prompt_tokens_details.cached_tokens, 0)
        self.assertIn("reason", answer.selkie)

    def test_stream(self):
        options = {"include_usage": True}
        chunks = list(
            self.client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, stream_options=options)
        )
        self.assertEqual("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), ANSWER)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual((chunks[-1].choices, chunks[-1].usage.completion_tokens), ([], 12))
        with self.client.chat.completions.stream(model="demo", messages=MESSAGES) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
            self.assertEqual((text, stream.get_final_completion().choices[0].message.content), (ANSWER, ANSWER))

    def test_completions(self):
        prompts = ["Once upon a time", "Once upon a time"]
        answer = self.client.completions.create(model="demo", prompt=prompts, max_tokens=5, temperature=0)
        self.assertEqual(answer.choices[0].text, answer.choices[1].text)
        stream = self.client.completions.create(
            model="demo", prompt=prompts[0], max_tokens=5, temperature=0, stream=True
        )
        self.assertEqual("".join(c.choices[0].text for c in stream), answer.choices[0].text)
        drawn = self.client.completions.create(model="demo", prompt=prompts[0], max_tokens=9, temperature=1, n=3, seed=1)
        self.assertEqual(len(drawn.choices), 3)

    def test_responses(self):
        answer = self.client.responses.create(model="demo", input=QUESTION)
        self.assertEqual((answer.output_text, answer.status), (ANSWER, "completed"))
        with self.client.responses.stream(model="demo", input=QUESTION) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            self.assertEqual((text, stream.get_final_response().output_text), (ANSWER, ANSWER))

    def test_models_and_errors(self):
        self.assertEqual([m.id for m in self.client.models.list()], ["demo"])
        self.assertEqual(self.client.models.retrieve("demo").object, "model")
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.chat.completions.create(model="other", messages=MESSAGES)
        self.assertEqual((caught.exception.param, caught.exception.code), ("model", "model_not_found"))
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(model="demo", messages=MESSAGES, top_p=3)
        self.assertEqual(caught.exception.param, "top_p")
        with self.assertRaises(openai.APIStatusError):
            self.client.embeddings.create(model="demo", input="x")

    def test_many_at_once(self):
        async def ask():
            async with openai.AsyncOpenAI(base_url=url + "v1", api_key="any") as client:
                asked = (client.chat.completions.create(model="demo", messages=MESSAGES) for _ in range(24))
                return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

        self.assertEqual(asyncio.run(ask()), [ANSWER] * 24)


class Anthropic(unittest.TestCase):
    def setUp(self):
        self.client = anthropic.Anthropic(base_url=url, api_key="any")
        self.addCleanup(self.client.close)

    def test_message(self):
        answer = self.client.messages.create(model="demo", max_tokens=50, messages=MESSAGES, system="Be brief.")
        self.assertEqual((answer.content[0].text, answer.stop_reason), (ANSWER, "end_turn"))
        count = self.client.messages.count_tokens(model="demo", messages=MESSAGES, system="Be brief.")
        self.assertEqual(count.input_tokens, answer.usage.input_tokens)

    def test_stream(self):
        with self.client.messages.stream(model="demo", max_tokens=50, messages=MESSAGES) as stream:
            self.assertEqual("".join(stream.text_stream), ANSWER)
            final = stream.get_final_message()
        self.assertEqual((final.content[0].text, final.usage.output_tokens), (ANSWER, 12))

    def test_errors(self):
        with self.assertRaises(anthropic.NotFoundError):
            self.client.messages.create(model="other", max_tokens=5, messages=MESSAGES)
        with self.assertRaises(anthropic.BadRequestError):
            self.client.messages.create(model="demo", max_tokens=5, messages=[])


class LangChain(unittest.TestCase):
    def test_chat(self):
        model = ChatOpenAI(base_url=url + "v1", api_key="any", model="demo", temperature=0)
        answer = model.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
        self.assertEqual(answer.content, ANSWER)
        self.assertEqual(answer.usage_metadata["output_tokens"], 12)
        self.assertEqual("".join(chunk.content for chunk in model.stream(QUESTION)), ANSWER)
        self.assertEqual([a.content for a in model.batch([QUESTION] * 3)], [ANSWER] * 3)

    def test_completion(self):
        model = LangChainCompletion(base_url=url + "v1", api_key="any", model="demo", temperature=0, max_tokens=5)
        self.assertEqual(model.invoke("Once upon a time"), "".join(model.stream("Once upon a time")))


if __name__ == "__main__":
    unittest.main(verbosity=2)
