use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn tools() -> Tools {
    let tool = |name: &str, properties: Value| {
        json!({ "type": "function", "function": {
        "name": name, "parameters": { "type": "object", "properties": properties, "$defs": { "n": { "type": "integer" } } } } })
    };
    Tools::new(&[
        tool("get_weather", json!({ "city": { "type": "string" }, "days": { "type": "integer" } })),
        tool("get_time", json!({})),
        tool(
            "all",
            json!({ "s": { "type": "string" }, "i": { "$ref": "#/$defs/n" }, "f": { "type": "number" }, "b": { "type": "boolean" },
                "n": { "type": ["string", "null"] }, "a": { "type": "array" }, "o": { "anyOf": [{ "type": "object" }, { "type": "null" }] },
                "e": { "enum": [1, 2] } }),
        ),
    ])
}

fn parser(calls: CallFormat, reasoning: Option<Reasoning>, in_reasoning: bool) -> Parser {
    let format = Format { calls: Some(calls), reasoning };
    Parser::new(&format, tools(), Start { in_reasoning, ids: "call_".into(), ..Start::default() })
}

/// The events of pieces, adjacent texts joined.
fn events<'a>(mut parser: Parser, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Event> {
    let mut all: Vec<Event> = Vec::new();
    for piece in pieces {
        all.extend(parser.push(piece));
    }
    all.extend(parser.finish());
    joined(all)
}

fn joined(events: Vec<Event>) -> Vec<Event> {
    let mut all: Vec<Event> = Vec::new();
    for event in events {
        match (all.last_mut(), event) {
            (Some(Event::Content(a)), Event::Content(b)) => *a += &b,
            (Some(Event::Reasoning(a)), Event::Reasoning(b)) => *a += &b,
            (Some(Event::Arguments { text: a, .. }), Event::Arguments { text: b, .. }) => *a += &b,
            (_, event) => all.push(event),
        }
    }
    all
}

/// An answer: content, reasoning, calls with parsed arguments, and the sources of broken calls.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    content: String,
    reasoning: String,
    calls: Vec<(String, Value)>,
    broken: Vec<String>,
}

fn answer(events: &[Event]) -> Answer {
    let mut all = Answer::default();
    let mut open: Option<(String, String)> = None;
    for event in events {
        match event {
            Event::Content(text) => all.content += text,
            Event::Reasoning(text) => all.reasoning += text,
            Event::CallStarted { index, name, .. } => {
                assert_eq!(*index, all.calls.len() + all.broken.len());
                assert!(open.replace((name.clone(), String::new())).is_none());
            }
            Event::Arguments { text, .. } => open.as_mut().unwrap().1 += text,
            Event::CallEnded { .. } => {
                let (name, arguments) = open.take().unwrap();
                let value: Value = serde_json::from_str(&arguments).unwrap_or_else(|e| panic!("{arguments}: {e}"));
                assert!(value.is_object());
                all.calls.push((name, value));
            }
            Event::CallBroken { text, .. } => {
                open.take().unwrap();
                all.broken.push(text.clone());
            }
        }
    }
    assert!(open.is_none());
    all
}

/// The answer's events, which are the same however the text is cut.
fn read_all(calls: CallFormat, reasoning: Option<Reasoning>, in_reasoning: bool, text: &str) -> Vec<Event> {
    let new = || parser(calls, reasoning, in_reasoning);
    let whole = events(new(), [text]);
    for (cut, _) in text.char_indices() {
        assert_eq!(events(new(), [&text[..cut], &text[cut..]]), whole, "{text:?} cut at {cut}");
    }
    let mut bytes = [0; 4];
    let mut parser = new();
    let mut single = Vec::new();
    for c in text.chars() {
        single.extend(parser.push(c.encode_utf8(&mut bytes)));
    }
    single.extend(parser.finish());
    assert_eq!(joined(single), whole, "{text:?} in single characters");
    whole
}

fn read(calls: CallFormat, text: &str) -> Answer {
    answer(&read_all(calls, Some(Reasoning::Think), false, text))
}

fn calls(list: &[(&str, Value)]) -> Vec<(String, Value)> {
    list.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
}

#[test]
fn the_four_grammars() {
    use CallFormat::*;
    let paris = json!({ "city": "Paris", "days": 3 });
    let both = calls(&[("get_weather", paris.clone()), ("get_time", json!({}))]);
    for (format, text) in [
        (
            Hermes,
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>",
        ),
        (
            Jamba,
            "<tool_calls>[\n    {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}},\n    {\"name\": \"get_time\"}\n]</tool_calls>",
        ),
        (
            Xml,
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        ),
        (Python, "<|tool_call_start|>[get_weather(city=\"Paris\", days=3), get_time()]<|tool_call_end|>"),
        (
            Kimi,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Paris\", \"days\": 3}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ] {
        assert_eq!(read(format, text), Answer { calls: both.clone(), ..Answer::default() }, "{text}");
        // White space around calls belongs to nothing; text is kept.
        let talk = format!("<think>\nWhich city?\n</think>\n\nI'll look.\n\n{text}\n\nDone. \n");
        let want = Answer {
            content: "I'll look.Done. \n".into(),
            reasoning: "Which city?".into(),
            calls: both.clone(),
            ..Answer::default()
        };
        assert_eq!(read(format, &talk), want, "{talk}");
        // The closing tag and what closes a list may be missing.
        let cut = text.rfind(format.tags().1).unwrap();
        assert_eq!(read(format, &text[..cut]).calls, both, "{text}");
        // A call ends reasoning.
        let want = Answer { reasoning: "Hm.".into(), calls: both.clone(), ..Answer::default() };
        assert_eq!(answer(&read_all(format, Some(Reasoning::Think), true, &format!("Hm.\n{text}"))), want);
    }
}

#[test]
fn the_name_comes_first_and_arguments_as_they_are_written() {
    let text = "<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Pa";
    let mut parser = parser(CallFormat::Hermes, None, false);
    let started = Event::CallStarted { index: 0, id: "call_0".into(), name: "get_weather".into() };
    let arguments = |text: &str| Event::Arguments { index: 0, text: text.into() };
    assert_eq!(parser.push(text), [started, arguments("{\"city\": \"Pa")]);
    assert_eq!(parser.push("ris\"}"), [arguments("ris\"}")]);
    assert_eq!(parser.push("}"), [Event::CallEnded { index: 0 }]);
    assert_eq!(parser.push("</tool_call>"), []);
    assert_eq!(parser.finish(), []);
    // Kimi's ids are the model's own.
    let kimi = "<|tool_calls_section_begin|><|tool_call_begin|> functions.get_time:7 <|tool_call_argument_begin|> {}";
    let events = events(self::parser(CallFormat::Kimi, None, false), [kimi]);
    assert_eq!(events[0], Event::CallStarted { index: 0, id: "functions.get_time:7".into(), name: "get_time".into() });
    // A parameter's text is shown before its end, but for a line feed that may be the last.
    let mut parser = self::parser(CallFormat::Xml, None, false);
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\nNew ");
    assert_eq!(parser.push("York\n"), [arguments("York")]);
    assert_eq!(parser.push("City"), [arguments("\\nCity")]);
}

#[test]
fn forms_of_json_calls() {
    let city = |c: &str| calls(&[("get_weather", json!({ "city": c }))]);
    for (text, want) in [
        ("{\"arguments\": {\"city\": \"a\"}, \"name\": \"get_weather\"}", city("a")),
        ("{\"name\": \"get_weather\", \"parameters\": {\"city\": \"b\"}, \"id\": 12}", city("b")),
        (
            "{\"id\": [1, {\"name\": null}], \"name\": \"get_weather\", \"arguments\": \"{\\\"city\\\": \\\"c\\\"}\"}",
            city("c"),
        ),
        ("[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"d\"}}]", city("d")),
        ("{\"name\": \"get_time\"}", calls(&[("get_time", json!({}))])),
        ("{\"name\": \"get_time\", \"arguments\": null}", calls(&[("get_time", json!({}))])),
        ("{\"name\": \"get_time\", \"arguments\": \"\"}", calls(&[("get_time", json!({}))])),
        // Tags, braces and quotes inside of strings, and control characters, which JSON does not allow there.
        (
            "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"</tool_call> }{ \\\" \\\\ é 東\\n\n\t\"}}",
            city("</tool_call> }{ \" \\ é 東\n\n\t"),
        ),
        ("{\"name\": \"g\\u0065t_\\ud83d\\ude00\", \"arguments\": {\"x\": [1, -0.5e+3, true, null, {}]}}", {
            calls(&[("get_😀", json!({ "x": [1, -0.5e+3, true, null, {}] }))])
        }),
    ] {
        let text = format!("<tool_call>{text}</tool_call>");
        assert_eq!(read(CallFormat::Hermes, &text), Answer { calls: want, ..Answer::default() }, "{text}");
    }
    let two = "<tool_call>{\"name\": \"get_time\"}\n{\"name\": \"get_time\"}<tool_call>{\"name\": \"get_time\"}";
    assert_eq!(read(CallFormat::Hermes, two).calls.len(), 3);
}

#[test]
fn xml_values_have_the_types_of_the_schema() {
    let mut text = String::from("<tool_call>\n<function=all>\n");
    for (key, value) in [
        ("s", "\n\"42\"\n<b>\\n</b>\n\n"),
        ("i", "\n42\n"),
        ("f", " 2.5 "),
        ("b", "True"),
        ("n", "null"),
        ("a", "\n[1,\n \"x\"]\n"),
        ("o", "{'k': (1, True, None, [],), \"q\": 'it\\'s'}"),
        ("e", "2"),
        ("other", "7"),
    ] {
        text += &format!("<parameter={key}>{value}</parameter>\n");
    }
    text += "</function>\n</tool_call>";
    let want = json!({ "s": "\"42\"\n<b>\\n</b>\n", "i": 42, "f": 2.5, "b": true, "n": null, "a": [1, "x"],
        "o": { "k": [1, true, null, []], "q": "it's" }, "e": 2, "other": "7" });
    assert_eq!(read(CallFormat::Xml, &text).calls, calls(&[("all", want)]));
    // Values that are not of their type.
    let text = "<tool_call><function=all><parameter=i>many</parameter><parameter=b>2</parameter><parameter=n>12</parameter><parameter=f>1e999</parameter></function></tool_call>";
    let want = json!({ "i": "many", "b": 2, "n": "12", "f": "1e999" });
    assert_eq!(read(CallFormat::Xml, text).calls, calls(&[("all", want)]));
    // Tags that were forgotten, and a call without the tag around it.
    let text = "<function=get_weather><parameter=city>Oslo<parameter=days>1</function>";
    let want = calls(&[("get_weather", json!({ "city": "Oslo", "days": 1 }))]);
    assert_eq!(read(CallFormat::Xml, text).calls, want);
    let text =
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>1</parameter>\n";
    assert_eq!(read(CallFormat::Xml, text).calls, want);
}

#[test]
fn python_literals_become_json() {
    let text = "<|tool_call_start|>[all(s='it\\'s \"é\"\\n\\x41\\u00e9\\U0001F600\\d', i=-1_000, f=+.5, b=True, n=None, a=[1, 'x', (2,), {},], o={'k': {1: \"v\"}, \"m\": []}, e=\"\", t='''a'b\n\"\"''' )]<|tool_call_end|>";
    let want = json!({ "s": "it's \"é\"\nAé😀\\d", "i": -1000, "f": 0.5, "b": true, "n": null, "a": [1, "x", [2], {}],
        "o": { "k": { "1": "v" }, "m": [] }, "e": "", "t": "a'b\n\"\"" });
    assert_eq!(read(CallFormat::Python, text).calls, calls(&[("all", want)]));
    for text in [
        "<|tool_call_start|>get_time()<|tool_call_end|>",
        "<|tool_call_start|>[{\"name\": \"get_time\", \"arguments\": {}}]<|tool_call_end|>",
    ] {
        let want = Answer { calls: calls(&[("get_time", json!({}))]), ..Answer::default() };
        assert_eq!(read(CallFormat::Python, text), want, "{text}");
    }
}

#[test]
fn what_only_looks_like_a_call_is_content() {
    use CallFormat::*;
    for (format, text) in [
        (Hermes, "Write <tool_call> and </tool_call> around it. <tool_cal"),
        (Hermes, " <tool_call>\n </tool_call> "),
        (Hermes, "a <tool_call>{\"title\": \"x\"}</tool_call>"),
        (Hermes, "a <tool_call>{\"name\": 7, \"arguments\": {}}</tool_call>"),
        (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>\n"),
        (Hermes, "<tool_call>{name: f}</tool_call>"),
        (Hermes, "<tool_call>{\"name\": \"get_time\""),
        (Jamba, "<tool_calls>[]</tool_calls>"),
        (Xml, "Use `<function=name>` and `<parameter=x>`."),
        (Xml, "<tool_call>\n<function=a\nb>"),
        (Xml, "if a <function> b </function>"),
        (Python, "<|tool_call_start|>[1, 2]<|tool_call_end|>"),
        (Python, "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        (Kimi, "<|tool_calls_section_begin|> none <|tool_calls_section_end|>"),
        (Kimi, "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[]"),
    ] {
        let want = Answer { content: text.into(), ..Answer::default() };
        assert_eq!(read(format, text), want, "{text}");
    }
    // Without tools nothing is a call.
    let text = "<tool_call>{\"name\": \"get_time\"}</tool_call>";
    let none = Parser::new(&Format { calls: Some(Hermes), reasoning: None }, Tools::default(), Start::default());
    assert_eq!(events(none, [text]), [Event::Content(text.into())]);
}

#[test]
fn a_call_that_breaks_off_has_its_source() {
    use CallFormat::*;
    for (format, before, text, after) in [
        (Hermes, "So: ", "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ", ""),
        (Hermes, "", "<tool_call>{\"name\": \"f\", \"arguments\": {", "'a': 1}}</tool_call> end"),
        (Hermes, "", "<tool_call>{\"name\": \"f\", \"arguments\": {}", "]</tool_call>"),
        (Xml, "", "<tool_call>\n<function=f>\n<parameter=a>\nx", ""),
        (Xml, "", "<tool_call>\n<function=f>\n", "text</function>"),
        (Python, "", "<|tool_call_start|>[f(a=open", "('x'))]<|tool_call_end|>"),
        (Kimi, "", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{\"a\"", ""),
    ] {
        let all = format!("{before}{text}{after}");
        let read = read(format, &all);
        assert!(read.calls.is_empty(), "{all}");
        // A caller that puts the source in its place has the answer unchanged.
        assert_eq!(
            format!("{}{}{}", before.trim_end(), read.broken.concat(), after).trim_end(),
            all.trim_end(),
            "{all}"
        );
        assert_eq!(read.content, format!("{}{after}", before.trim_end()), "{all}");
    }
}

#[test]
fn reasoning() {
    use CallFormat::Hermes;
    let think = |in_reasoning: bool, text: &str| {
        let all = answer(&read_all(Hermes, Some(Reasoning::Think), in_reasoning, text));
        (all.reasoning, all.content)
    };
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    for (open, text, want) in [
        (false, "<think>a</think>b", pair("a", "b")),
        (false, "\n<think>\n\na\n\nb\n</think>\n\nc\n", pair("a\n\nb", "c\n")),
        (true, "a</think>b", pair("a", "b")),
        (true, "<think>\na</think>b", pair("a", "b")),
        (true, "a < b </thin > c", pair("a < b </thin > c", "")),
        (false, "<think>a", pair("a", "")),
        (false, "<think></think>", pair("", "")),
        (false, "</think>\n\nb", pair("", "b")),
        // Reasoning begins an answer; elsewhere these are words.
        (false, "the tags <think> and </think>", pair("", "the tags <think> and </think>")),
        (true, "a <think> b</think>c</think>d", pair("a <think> b", "c</think>d")),
        (false, "<tool_call>x", pair("", "<tool_call>x")),
        (true, "say <tool_call> x", pair("say <tool_call> x", "")),
    ] {
        assert_eq!(think(open, text), want, "{text:?}");
    }
    let spoken = |text: &str| {
        let all = answer(&read_all(Hermes, Some(Reasoning::Spoken), false, text));
        (all.reasoning, all.content)
    };
    assert_eq!(spoken("Here is my thought process: a. Here is my response: b"), pair("a.", "b"));
    assert_eq!(spoken("Here's my thought process:\na\nHere's my response:\nb"), pair("a", "b"));
    assert_eq!(spoken("Here is my dog. Here is my response: b"), pair("", "Here is my dog. Here is my response: b"));
}

#[test]
fn reasoning_is_the_content_of_an_answer_that_has_no_other() {
    let format = Format { calls: Some(CallFormat::Xml), reasoning: Some(Reasoning::Think) };
    let start = || Start { in_reasoning: true, content_required: true, ids: String::new() };
    let all = |text: &str| answer(&events(Parser::new(&format, tools(), start()), [text]));
    assert_eq!(all("It is 4. \n").content, "It is 4.");
    assert_eq!(all("It is 4.</think>\n\n").content, "It is 4.");
    assert_eq!(all("Hm.</think>4").content, "4");
    let call = all("Hm.</think><tool_call><function=get_time></function></tool_call>");
    assert_eq!((&*call.content, call.calls.len()), ("", 1));
}

#[test]
fn special_tokens_are_marks_or_nothing() {
    let mut parser = parser(CallFormat::Python, None, false);
    let mut all = parser.push("Hi <|tool_");
    all.extend(parser.push_special("<|im_start|>"));
    all.extend(parser.push_special("<|tool_call_start|>"));
    all.extend(parser.push("[get_time()]"));
    all.extend(parser.push_special("<|tool_call_end|>"));
    all.extend(parser.push("ok"));
    all.extend(parser.finish());
    let all = answer(&joined(all));
    assert_eq!((&*all.content, all.calls.len()), ("Hi <|tool_ok", 1));
    // The closing token ends a call that is not complete.
    let mut parser = self::parser(CallFormat::Python, None, false);
    let mut all = parser.push_special("<|tool_call_start|>");
    all.extend(parser.push("[f(a='x"));
    all.extend(parser.push_special("<|tool_call_end|>"));
    all.extend(parser.push("ok"));
    all.extend(parser.finish());
    let all = answer(&joined(all));
    assert_eq!((all.broken.len(), &*all.content), (1, "ok"));
}

#[test]
fn formats_of_templates() {
    use CallFormat::*;
    let none = |_: &str| false;
    for (template, calls) in [
        ("<tool_call>\n<function=example>\n<parameter=x>", Some(Xml)),
        ("{{ '<tool_call>' }}{\"name\": ", Some(Hermes)),
        ("<tool_calls>[", Some(Jamba)),
        ("List of tools: <|tool_list_start|>", Some(Python)),
        ("<|tool_calls_section_begin|>", Some(Kimi)),
        ("{{ messages }}", None),
    ] {
        assert_eq!(Format::detect(template, none).calls, calls, "{template}");
    }
    assert_eq!(Format::detect("", |text| text == "<|tool_call_start|>").calls, Some(Python));
    let think = Format::detect("{% if '</think>' in content %}", none);
    assert!(think.opens_reasoning("<|im_start|>assistant\n<think>\n"));
    assert!(!think.opens_reasoning("<think>\n\n</think>\n\n"));
    assert!(!Format::default().opens_reasoning("<think>"));
    for format in CallFormat::ALL {
        assert_eq!(CallFormat::from_name(format.name()), Some(format));
    }
}

/// Time must not grow with the square of the length: these would take minutes.
#[test]
fn long_answers_take_linear_time() {
    let n = 1 << 20;
    for (format, text) in [
        (CallFormat::Hermes, "<tool_call".repeat(n / 10)),
        (
            CallFormat::Hermes,
            format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": \"{}\"}}}}", "<".repeat(n)),
        ),
        (CallFormat::Hermes, format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": {}", "[".repeat(n))),
        (CallFormat::Xml, format!("<tool_call><function=f><parameter=a>{}", "</parameter".repeat(n / 10))),
        (CallFormat::Python, format!("<|tool_call_start|>[f(a={}", "[".repeat(n))),
        (CallFormat::Hermes, " ".repeat(n)),
    ] {
        let mut parser = parser(format, Some(Reasoning::Think), false);
        let start = std::time::Instant::now();
        let mut bytes = [0; 4];
        for c in text.chars() {
            parser.push(c.encode_utf8(&mut bytes));
        }
        parser.finish();
        assert!(start.elapsed().as_secs() < 20, "{:?}", &text[..40]);
    }
}

fn formats() -> impl Strategy<Value = (CallFormat, bool)> {
    (proptest::sample::select(&CallFormat::ALL[..]), any::<bool>())
}

fn fragments() -> impl Strategy<Value = String> {
    let parts = [
        "<tool_call>",
        "</tool_call>",
        "<tool_calls>",
        "</tool_calls>",
        "<function=",
        "get_time",
        ">",
        "</function>",
        "<parameter=",
        "</parameter>",
        "{",
        "}",
        "[",
        "]",
        "\"name\"",
        "\"arguments\"",
        ":",
        ",",
        "\"",
        "\\",
        "'",
        "(",
        ")",
        "=",
        " ",
        "\n",
        "f",
        "é",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<think>",
        "</think>",
        "1",
        "true",
        "<",
        "{\"name\": \"get_time\", \"arguments\": {",
    ];
    let fragment = proptest::sample::select(parts.to_vec()).prop_map(String::from);
    proptest::collection::vec(prop_oneof![8 => fragment, 1 => any::<String>()], 0..24).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_cut_gives_the_same_events((format, open) in formats(), text in fragments(), cuts in proptest::collection::vec(any::<u16>(), 0..6)) {
        let whole = events(parser(format, Some(Reasoning::Think), open), [&*text]);
        answer(&whole);
        let mut cuts: Vec<usize> = cuts.iter().map(|c| text.floor_char_boundary(*c as usize % (text.len() + 1))).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|w| &text[w[0]..w[1]]);
        prop_assert_eq!(events(parser(format, Some(Reasoning::Think), open), pieces), whole);
    }

    #[test]
    fn text_without_calls_is_unchanged((format, _) in formats(), text in fragments()) {
        let all = events(parser(format, None, false), [&*text]);
        if !all.iter().any(|event| matches!(event, Event::CallStarted { .. })) {
            prop_assert_eq!(answer(&all).content, text);
        }
    }
}
