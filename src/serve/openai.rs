//! OpenAI's `/v1/chat/completions` and `/v1/completions`.

use selkie_core::{
    chat::{Conversation, End},
    controls::MOST_TOP,
    reply::Event,
    session::Prompt,
};
use serde_json::{Value, json, value::RawValue};

use super::{
    answer::Speak,
    fields::Fields,
    refusal::{Dialect, Refusal},
    speech::{Call, Said, ToolUse, structure, template_values},
    sse::Out,
    voice::{Ended, Head, Tokens, Usage, Voice, content, extension},
    wanted::{MOST_CHOICES, Wanted, messages},
};

/// How much of an answer is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extras {
    /// A stream ends with the numbers of tokens.
    pub usage: bool,
    /// Each piece has the numbers of tokens so far.
    pub running_usage: bool,
    /// Token ids come with the text.
    pub ids: bool,
}

impl Extras {
    fn read(fields: &Fields<'_>) -> Result<Self, Refusal> {
        let ids = fields.flag("return_token_ids")?;
        let Some(options) = fields.raw("stream_options") else { return Ok(Self { ids, ..Self::default() }) };
        let options = Fields::of("stream_options".into(), options)?;
        let usage = options.flag("include_usage")?;
        Ok(Self { usage, running_usage: options.flag("continuous_usage_stats")?, ids })
    }
}

/// Reads a request for a chat.
///
/// # Errors
/// If it is not one that can be answered.
pub fn chat(fields: &Fields<'_>) -> Result<(Wanted, Extras), Refusal> {
    let mut wanted = Wanted::openai(fields)?;
    fields.refuse_unless(&[("echo", "false")])?;
    wanted.prompt_logprobs = fields.count("prompt_logprobs", 0, MOST_TOP as u64)?.map(|top| top as u8);
    wanted.tools = ToolUse::openai(fields)?;
    wanted.structure = structure(fields)?;
    wanted.tools.allow(wanted.structure.as_ref(), fields)?;
    wanted.prompts = vec![Prompt::Conversation(conversation(fields, wanted.tools.tools.clone())?)];
    let top = fields.count("top_logprobs", 0, MOST_TOP as u64)?;
    wanted.controls.logprobs = match (fields.flag("logprobs")?, top) {
        (true, top) => Some(top.unwrap_or(0) as u8),
        (false, None | Some(0)) => None,
        (false, Some(_)) => return Err(fields.refuse("top_logprobs", "needs `logprobs`: true")),
    };
    Ok((wanted, Extras::read(fields)?))
}

/// The chat of a request, with these tools and its values for the template.
///
/// # Errors
/// If there are no messages, or a value is wrong.
pub fn conversation(fields: &Fields<'_>, tools: Vec<Value>) -> Result<Conversation, Refusal> {
    let goes_on = fields.flag("continue_final_message")?;
    let adds = fields.flag("add_generation_prompt")?;
    let end = match fields.raw("add_generation_prompt") {
        _ if goes_on => End::FinalMessage,
        Some(_) if !adds => End::Messages,
        _ => End::Answer,
    };
    if goes_on && adds {
        return Err(fields.refuse("continue_final_message", "and `add_generation_prompt` contradict each other"));
    }
    Ok(Conversation { messages: messages(fields, "messages")?, tools, values: template_values(fields)?, end })
}

/// Reads a request for a completion. The prompt is a text, token ids, or a list of either.
///
/// # Errors
/// If it is not one that can be answered.
pub fn completion(fields: &Fields<'_>) -> Result<(Wanted, Extras), Refusal> {
    let mut wanted = Wanted::openai(fields)?;
    // The number of tokens that this endpoint has always had without `max_tokens`.
    wanted.max_tokens = wanted.max_tokens.or(Some(16));
    wanted.structure = structure(fields)?;
    wanted.prompts = prompts(fields)?;
    wanted.controls.logprobs = match fields.raw("logprobs").map(RawValue::get) {
        Some("false") => None,
        _ => fields.count("logprobs", 0, MOST_TOP as u64)?.map(|top| top as u8),
    };
    wanted.echo = fields.flag("echo")?;
    wanted.prompt_logprobs = fields.count("prompt_logprobs", 0, MOST_TOP as u64)?.map(|top| top as u8);
    if fields.raw("top_logprobs").is_some() {
        return Err(fields.refuse("top_logprobs", "is for chats; here the number is `logprobs`"));
    }
    if wanted.prompts.is_empty() || wanted.choices() as u64 > MOST_CHOICES {
        let why = format!("and `n` ask for more than {MOST_CHOICES} answers, or for none");
        return Err(fields.refuse("prompt", &why));
    }
    Ok((wanted, Extras::read(fields)?))
}

/// The prompts of a completion.
///
/// # Errors
/// If there is none, or it has another form.
pub fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, Refusal> {
    let value = fields.raw("prompt").ok_or_else(|| fields.refuse("prompt", "is missing"))?.get();
    if let Ok(text) = serde_json::from_str(value) {
        return Ok(vec![Prompt::Text(text)]);
    }
    if let Ok(ids) = serde_json::from_str::<Vec<u32>>(value)
        && !ids.is_empty()
    {
        return Ok(vec![Prompt::Ids(ids)]);
    }
    if let Ok(texts) = serde_json::from_str::<Vec<String>>(value) {
        return Ok(texts.into_iter().map(Prompt::Text).collect());
    }
    serde_json::from_str::<Vec<Vec<u32>>>(value)
        .map(|lists| lists.into_iter().map(Prompt::Ids).collect())
        .map_err(|_| fields.refuse("prompt", "must be a string, a list of token ids, or a list of either"))
}

/// Reads a request for a chat, with the voice of its answer.
///
/// # Errors
/// As [`chat`].
pub fn read_chat(fields: &Fields<'_>) -> Result<(Wanted, Speak), Refusal> {
    let (wanted, extras) = chat(fields)?;
    Ok((wanted, Box::new(move |head| Box::new(OpenAi::new(head, true, extras)))))
}

/// Reads a request for a completion, with the voice of its answer.
///
/// # Errors
/// As [`completion`].
pub fn read_completion(fields: &Fields<'_>) -> Result<(Wanted, Speak), Refusal> {
    let (wanted, extras) = completion(fields)?;
    Ok((wanted, Box::new(move |head| Box::new(OpenAi::new(head, false, extras)))))
}

/// Says answers as one of the two endpoints.
pub struct OpenAi {
    head: Head,
    extras: Extras,
    chat: bool,
    /// Tokens of each answer so far.
    tokens: Vec<usize>,
}

impl OpenAi {
    /// For a chat, or else a completion.
    pub fn new(head: Head, chat: bool, extras: Extras) -> Self {
        Self { head, extras, chat, tokens: Vec::new() }
    }

    fn object(&self, piece: bool) -> Value {
        let Head { id, model, created, .. } = &self.head;
        let (id, object) = match (self.chat, piece) {
            (true, true) => (format!("chatcmpl-{id}"), "chat.completion.chunk"),
            (true, false) => (format!("chatcmpl-{id}"), "chat.completion"),
            (false, _) => (format!("cmpl-{id}"), "text_completion"),
        };
        json!({ "id": id, "object": object, "created": created, "model": model })
    }

    /// A piece with one choice. `content` is the delta of a chat, or the text of a completion.
    fn piece(&self, choice: usize, content: Value, finish: Option<&str>, of: Tokens) -> Value {
        let name = if self.chat { "delta" } else { "text" };
        let mut said = json!({ "index": choice, name: content, "logprobs": of.logprobs, "finish_reason": finish });
        if self.extras.ids && !of.ids.is_empty() {
            said["token_ids"] = of.ids.into();
        }
        let mut piece = self.object(true);
        if let Some(list) = of.prompt_logprobs {
            // Where vLLM has it in whole answers.
            let place = if self.chat { &mut piece } else { &mut said };
            place["prompt_logprobs"] = list;
        }
        piece["choices"] = json!([said]);
        if self.extras.running_usage {
            let (prompt, completion) = (self.head.prompt_tokens, self.tokens.iter().sum());
            piece["usage"] = Usage { prompt, completion, ..Usage::default() }.openai();
        } else if self.extras.usage {
            piece["usage"] = Value::Null;
        }
        piece
    }
}

/// A part of an answer as the change of a message.
fn delta(event: &Event) -> Option<Value> {
    Some(match event {
        Event::Content(text) | Event::CallBroken { text, .. } => json!({ "content": text }),
        // The second name is the older one.
        Event::Reasoning(text) => json!({ "reasoning": text, "reasoning_content": text }),
        Event::CallStarted { index, id, name } => {
            let function = json!({ "name": name, "arguments": "" });
            json!({ "tool_calls": [{ "index": index, "id": id, "type": "function", "function": function }] })
        }
        Event::Arguments { index, text } => {
            json!({ "tool_calls": [{ "index": index, "function": { "arguments": text } }] })
        }
        Event::CallEnded { .. } => return None,
    })
}

/// An answer as a message.
fn message(said: &Said) -> Value {
    let mut message = json!({ "role": "assistant", "content": said.content, "refusal": null });
    if !said.reasoning.is_empty() {
        message["reasoning"] = (&*said.reasoning).into();
        message["reasoning_content"] = (&*said.reasoning).into();
    }
    if !said.calls.is_empty() {
        if said.content.is_empty() {
            message["content"] = Value::Null;
        }
        let call = |call: &Call| {
            let function = json!({ "name": call.name, "arguments": call.arguments });
            json!({ "id": call.id, "type": "function", "function": function })
        };
        message["tool_calls"] = said.calls.iter().map(call).collect();
    }
    message
}

impl Voice for OpenAi {
    fn begin(&mut self, out: &Out, choices: usize) {
        self.tokens = vec![0; choices];
        for choice in (0..choices).filter(|_| self.chat) {
            out.data(&self.piece(choice, json!({ "role": "assistant", "content": "" }), None, Tokens::default()));
        }
    }

    fn said(&mut self, out: &Out, choice: usize, events: &[Event], mut tokens: Tokens) {
        self.tokens[choice] += tokens.ids.len();
        let deltas: Vec<Value> = match self.chat {
            true => events.iter().filter_map(delta).collect(),
            false => Some(content(events)).filter(|text| !text.is_empty()).into_iter().map(Value::from).collect(),
        };
        for delta in deltas {
            out.data(&self.piece(choice, delta, None, std::mem::take(&mut tokens)));
        }
        // Tokens whose text is held back, or is none.
        if tokens.logprobs.is_some() || tokens.prompt_logprobs.is_some() || (self.extras.ids && !tokens.ids.is_empty())
        {
            let nothing = if self.chat { json!({ "content": "" }) } else { "".into() };
            out.data(&self.piece(choice, nothing, None, tokens));
        }
    }

    fn end(&mut self, out: &Out, choice: usize, ended: &Ended) {
        self.tokens[choice] = ended.ids.len();
        let content = if self.chat { json!({}) } else { "".into() };
        out.data(&self.piece(choice, content, Some(ended.openai_finish()), Tokens::default()));
    }

    fn finish(&mut self, out: &Out, answers: &[Ended]) {
        if self.extras.usage || self.extras.running_usage {
            let mut last = self.object(true);
            last["choices"] = json!([]);
            last["usage"] = Usage::of(answers, self.head.n).openai();
            last["selkie"] = extension(answers);
            out.data(&last);
        }
        out.done();
    }

    fn fail(&mut self, out: &Out, why: &Refusal) {
        out.data(&why.body(Dialect::OpenAi));
        out.done();
    }

    fn whole(&self, answers: &[Ended]) -> Value {
        let choice = |(i, ended): (usize, &Ended)| {
            let finish = ended.openai_finish();
            let mut said = json!({ "index": i });
            if self.chat {
                said["message"] = message(&ended.said);
            } else {
                said["text"] = (&*ended.said.content).into();
            }
            said["logprobs"] = ended.logprobs.clone().into();
            if let Some(list) = ended.prompt_logprobs.as_ref().filter(|_| !self.chat) {
                said["prompt_logprobs"] = list.clone();
            }
            said["finish_reason"] = finish.into();
            if self.extras.ids {
                said["token_ids"] = (&*ended.ids).into();
            }
            said
        };
        let mut all = self.object(false);
        all["choices"] = answers.iter().enumerate().map(choice).collect();
        // The choices of a chat have one prompt.
        if let Some(list) = answers.first().and_then(|a| a.prompt_logprobs.as_ref()).filter(|_| self.chat) {
            all["prompt_logprobs"] = list.clone();
        }
        all["usage"] = Usage::of(answers, self.head.n).openai();
        all["selkie"] = extension(answers);
        all
    }
}

#[cfg(test)]
mod tests {
    use selkie_core::engine::FinishReason;

    use super::*;
    use crate::serve::voice::tests::{ended, head, streamed};

    #[test]
    fn prompts_of_a_completion() {
        let read = |prompt: &str| {
            let body = format!("{{\"prompt\": {prompt}}}");
            completion(&Fields::body(body.as_bytes()).unwrap()).map(|(wanted, _)| wanted.prompts)
        };
        assert_eq!(read("\"a\"").unwrap(), [Prompt::Text("a".into())]);
        assert_eq!(read("[1, 2]").unwrap(), [Prompt::Ids(vec![1, 2])]);
        assert_eq!(read("[\"a\", \"b\"]").unwrap(), [Prompt::Text("a".into()), Prompt::Text("b".into())]);
        assert_eq!(read("[[1], [2]]").unwrap(), [Prompt::Ids(vec![1]), Prompt::Ids(vec![2])]);
        for bad in ["null", "[]", "7", "[1, \"a\"]", "[-1]", "[4294967296]", "{}"] {
            assert_eq!(read(bad).unwrap_err().param.as_deref(), Some("prompt"), "{bad}");
        }
        assert!(read(&format!("[{}\"a\"]", "\"a\",".repeat(128))).is_err());
    }

    #[test]
    fn a_chat_in_pieces() {
        let mut voice = OpenAi::new(head(), true, Extras { usage: true, ..Extras::default() });
        let events = streamed(&mut voice);
        let deltas: Vec<&Value> = events.iter().map(|(_, e)| &e["choices"][0]["delta"]).collect();
        assert_eq!(*deltas[0], json!({"role": "assistant", "content": ""}));
        assert_eq!(*deltas[1], json!({"content": "17 +"}));
        assert_eq!(*deltas[2], json!({"content": " 25"}));
        assert_eq!((deltas[3], &events[3].1["choices"][0]["finish_reason"]), (&json!({}), &json!("stop")));
        let usage = &events[4].1;
        assert_eq!((&usage["choices"], &usage["usage"]["total_tokens"]), (&json!([]), &json!(103)));
        assert_eq!(usage["selkie"]["reason"], "first_sight");
        assert_eq!(events[5].1, "[DONE]");
        assert!(events[..5].iter().all(|(_, e)| e["id"] == "chatcmpl-7f" && e["object"] == "chat.completion.chunk"));
        assert_eq!(events[0].1["usage"], Value::Null);
    }

    #[test]
    fn a_completion_with_ids() {
        let mut voice = OpenAi::new(head(), false, Extras { ids: true, ..Extras::default() });
        let events = streamed(&mut voice);
        assert_eq!(events[0].1["choices"][0]["text"], "17 +");
        assert_eq!(events[0].1["choices"][0]["token_ids"], json!([1, 2]));
        assert_eq!(events[2].1["choices"][0]["finish_reason"], "stop");
        assert_eq!((events.len(), &events[3].1), (4, &json!("[DONE]")));
    }

    #[test]
    fn whole_answers() {
        let head = Head { n: 2, ..head() };
        let answers = [ended("a", FinishReason::Stop), ended("b", FinishReason::Length)];
        let chat = OpenAi::new(head.clone(), true, Extras::default()).whole(&answers);
        assert_eq!(chat["choices"][1]["message"]["content"], "b");
        assert_eq!(chat["choices"][1]["finish_reason"], "length");
        assert_eq!(chat["usage"]["prompt_tokens_details"]["cached_tokens"], 64);
        assert_eq!((&chat["usage"]["prompt_tokens"], &chat["usage"]["completion_tokens"]), (&json!(100), &json!(6)));
        let text = OpenAi::new(head, false, Extras::default()).whole(&answers);
        assert_eq!((&text["object"], &text["choices"][0]["text"]), (&json!("text_completion"), &json!("a")));
    }
}
