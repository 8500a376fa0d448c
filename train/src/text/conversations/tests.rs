//! Rows against tokens that were written by hand, and what is wrong with lines.

use super::super::Bpe;
use super::*;

/// `U` and `A` before what is said, and `.` behind it.
const TEMPLATE: &str = "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A', 'system': 'S'}[m.role] + m.content }}.{% endfor %}{% if add_generation_prompt %}A{% endif %}";

/// A folder with the template and a file, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, lines: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("phalanx-conversations-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("chat_template.jinja"), TEMPLATE).unwrap();
        std::fs::write(path.join("data.jsonl"), lines).unwrap();
        Folder(path)
    }

    fn open(&self, context: usize) -> Result<Conversations> {
        let codec = Codec::of(&self.0)?;
        Conversations::open(
            self.0.join("data.jsonl"),
            &codec,
            &ChatTemplate::of(&self.0)?,
            context,
            Answers::All,
        )
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The bytes of inputs and targets, `-` for those that are ignored and `0` for padding.
fn shown(data: &Conversations, index: usize) -> [String; 2] {
    let text = |tensor: &Tensor| {
        let of = |&token: &i64| {
            if token < 0 {
                '-'
            } else if token == 0 {
                '0'
            } else {
                token as u8 as char
            }
        };
        tensor.to_vec::<i64>().unwrap().iter().map(of).collect()
    };
    let [inputs, targets, ..] = &data.item(index, 0).unwrap()[..] else { panic!("two tensors") };
    [text(inputs), text(targets)]
}

const TALK: &str = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "name": null}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}], "id": 3}"#;
const SHORT: &str = r#"{"prompt": "hi", "completion": "yo"}"#;

#[test]
fn answers_with_their_ends_are_the_targets() {
    let folder = Folder::new("masks", &format!("{TALK}\n\n{SHORT}\n"));
    let data = folder.open(16).unwrap();
    assert_eq!(data.len(), 2);
    assert_eq!(shown(&data, 0), ["Ss.Uhi.Ayo.Ub.Ac", "-------yo.----c."]);
    assert_eq!(shown(&data, 1), ["Uhi.Ayo000000000", "----yo.---------"]);
    assert_eq!([0, 1, 2].map(|row| data.counted(row)), [Some(5), Some(3), None]);
    let summary = data.summary();
    assert!(summary.ends_with("data.jsonl: 2 conversations, 25 tokens, 8 of them answers'"), "{summary}");
    assert!(data.item(2, 0).unwrap_err().to_string().ends_with("got item 2, wanted one of 2"));
    data.check_vocabulary(usize::from(b'y') + 1).unwrap();
    let error = data.check_vocabulary(usize::from(b'y')).unwrap_err().to_string();
    assert!(error.ends_with("got token 121, wanted one of the model's vocabulary of 121"), "{error}");
}

#[test]
fn long_rows_are_cut_and_what_is_left_out_is_said() {
    let folder = Folder::new("cut", &format!("{TALK}\n{SHORT}"));
    let data = folder.open(9).unwrap();
    assert_eq!(shown(&data, 0), ["Ss.Uhi.Ay", "-------yo"]);
    assert_eq!(data.counted(0), Some(2));
    let summary = data.summary();
    let wanted = "; 1 were cut to `context` 9, which leaves out 7 more tokens, 3 of them answers'";
    assert!(summary.ends_with(wanted), "{summary}");
    let error = folder.open(7).err().unwrap().to_string();
    let wanted = "data.jsonl, line 1: no token of an answer is left in a row of `context` 7: 8 of its 17 tokens come before the first answer";
    assert!(error.ends_with(wanted), "{error}");
}

#[test]
fn packed_rows_have_whole_conversations_and_say_where_they_begin() {
    let lines = ["aa", "b", "cccc", "dd", "e"];
    let line = |answer: &&str| format!("{{\"prompt\": \"\", \"completion\": \"{answer}\"}}\n");
    let folder = Folder::new("packed", &lines.iter().map(line).collect::<String>());
    let data = folder.open(12).unwrap().packed();
    // The longest first: `cccc` with 7 places, `aa` and `dd` with 5, `b` and `e` with 4.
    let of = |index: usize| (shown(&data, index), starts(&data, index));
    let row = |inputs: &str, targets: &str, starts: &str| {
        ([inputs.to_string(), targets.into()], starts.to_string())
    };
    assert_eq!(of(0), row("U.AccccU.Aaa", "--cccc.--aa.", "000000077777"));
    assert_eq!(of(1), row("U.AddU.Ab000", "--dd.--b.---", "000005555999"));
    assert_eq!(of(2), row("U.Ae00000000", "--e.--------", "000044444444"));
    let counts = (0..data.len()).map(|item| data.counted(item).unwrap()).collect::<Vec<_>>();
    assert_eq!(counts, [8, 5, 2]);
    assert!(data.summary().contains("15 of them answers', in 3 rows"), "{}", data.summary());
    assert_eq!(data.identity(), folder.open(12).unwrap().identity());
}

/// The third tensor, in hexadecimal digits.
fn starts(data: &Conversations, index: usize) -> String {
    let starts = data.item(index, 0).unwrap()[2].to_vec::<i64>().unwrap();
    starts.into_iter().map(|start| char::from_digit(start as u32, 16).unwrap()).collect()
}

#[test]
fn the_last_answer_alone_is_learned_if_that_is_wanted() {
    let folder = Folder::new("last", TALK);
    let (codec, template) = (Codec::of(&folder.0).unwrap(), ChatTemplate::of(&folder.0).unwrap());
    let path = folder.0.join("data.jsonl");
    let last = Conversations::open(&path, &codec, &template, 16, Answers::Last).unwrap();
    assert_eq!(shown(&last, 0), ["Ss.Uhi.Ayo.Ub.Ac", "--------------c."]);
    assert_eq!(last.counted(0), Some(2));
    assert_ne!(last.identity(), folder.open(16).unwrap().identity());
}

#[test]
fn the_identity_is_that_of_messages_and_template() {
    let identity = |lines: &str| Folder::new("identity", lines).open(32).unwrap().identity();
    let one = identity(SHORT);
    assert!(one.starts_with("1 conversations "), "{one}");
    assert_eq!(one, identity(&SHORT.replace(", ", ",   ")));
    assert_ne!(one, identity(&SHORT.replace("yo", "ya")));
    let folder = Folder::new("identity", SHORT);
    std::fs::write(folder.0.join("chat_template.jinja"), TEMPLATE.replace("}}.", "}};")).unwrap();
    assert_ne!(one, folder.open(32).unwrap().identity());
}

#[test]
fn spans_of_pairs_are_tokens() {
    let text = "the then they, there the; these the the thesis";
    let codec = Codec::Pairs(Bpe::train(text, 270), None);
    let span = text.find("there").unwrap()..text.find(" these").unwrap();
    let (tokens, spans) = codec.encode_spans(text, &[span.clone(), 0..3, 4..4]).unwrap();
    assert_eq!(tokens, codec.encode(text.as_bytes(), 1000).unwrap());
    assert!(tokens.len() < text.len());
    // A token with the space before the word begins outside of it.
    let decoded = codec.decode(&tokens[spans[0].clone()]).unwrap();
    assert!(text[span].ends_with(&decoded) && decoded.ends_with("the;"), "{decoded:?}");
    assert_eq!((codec.decode(&tokens[spans[1].clone()]).unwrap(), spans[2].len()), ("the".to_string(), 0));
}

#[test]
fn a_wrong_line_is_an_error_with_file_and_line() {
    let user = r#"{"role": "user", "content": "x"}"#;
    let cases = [
        ("[]", "got a list, wanted an object with `messages`"),
        (r#"{"text": "x"}"#, r#"got no conversation (further fields: ["text"]), wanted `messages`"#),
        (r#"{"prompt": "x"}"#, "got no conversation"),
        (r#"{"prompt": "x", "completion": 3}"#, "got a number under `completion`, wanted a text"),
        (r#"{"messages": "x"}"#, "got a text under `messages`, wanted a list"),
        (r#"{"messages": []}"#, "got messages of the roles [], wanted one of the role `assistant`"),
        (r#"{"messages": [USER]}"#, r#"got messages of the roles ["user"], wanted"#),
        (r#"{"messages": [USER, 3]}"#, "message 1: got a number, wanted {\"role\""),
        (r#"{"messages": [{"role": "user"}]}"#, "message 0: got no `content`, wanted"),
        (
            r#"{"messages": [{"role": "user", "content": ["x"]}]}"#,
            "message 0: got a list under `content`, wanted",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "x", "tool_calls": []}]}"#,
            "got `tool_calls`, which is not supported",
        ),
        (r#"{"messages": [USER], "completion": "x"}"#, "got both `messages` and `completion`"),
        (r#"{"messages": [USER], "tools": [1]}"#, "got `tools`, which is not supported"),
        (
            r#"{"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "x"}]}"#,
            "chat_template.jinja: line 1: ",
        ),
        ("{oops", "got no JSON value"),
    ];
    for (line, wanted) in cases {
        let line = line.replace("USER", user);
        let error = Folder::new("wrong", &format!("{SHORT}\n\n{line}\n")).open(32).err().unwrap().to_string();
        assert!(error.contains("data.jsonl, line 3: ") && error.contains(wanted), "{line}: {error}");
    }
    let absent = Folder::new("absent", SHORT);
    std::fs::remove_file(absent.0.join("data.jsonl")).unwrap();
    assert!(absent.open(32).err().unwrap().to_string().contains("data.jsonl: "));
}

/// As in the files of Llama 3 and GPT-2, the places of tokens are without the white space in them, and a token of white space alone has an
/// empty one.
#[cfg(feature = "tokenizers")]
#[test]
fn spans_of_a_tokenizer_with_trimmed_places_are_those_of_the_text() {
    let mut file = Bpe::train("the then they, there the; these the\n\n the\n\n thesis\n\n", 280).to_json();
    let specials = ["<|user|>", "<|model|>", "<|end|>"];
    let special = |(number, content): (usize, &&str)| {
        serde_json::json!({"id": 280 + number, "content": content, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false})
    };
    file["added_tokens"] = specials.iter().enumerate().map(special).collect();
    file["post_processor"] = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false});
    let tokenizer = tokenizers::Tokenizer::from_bytes(serde_json::to_vec(&file).unwrap()).unwrap();
    let codec = Codec::Tokenizer(Box::new(tokenizer), "tokenizer.json".into());
    let answers = ["the\n\n the <|end|>", "they;\n\n\n<|end|>"];
    let text = format!(
        "<|user|>\n\nthé <|end|>\n<|model|>\n\n{}\n<|user|>there<|end|>\n<|model|>\n\n{}\n",
        answers[0], answers[1]
    );
    let spans = answers.map(|answer| {
        let start = text.find(answer).unwrap();
        start..start + answer.len()
    });
    let (tokens, spans) = codec.encode_spans(&text, &spans).unwrap();
    assert_eq!(tokens, codec.encode(text.as_bytes(), 1000).unwrap());
    let end = codec.encode(b"<|end|>", 1000).unwrap();
    assert_eq!(end.len(), 1);
    for (span, answer) in spans.iter().zip(answers) {
        assert_eq!(codec.decode(&tokens[span.clone()]).unwrap(), answer);
        assert_eq!(tokens[span.end - 1], end[0]);
        assert!(codec.decode(&tokens[..span.start]).unwrap().ends_with("<|model|>\n\n"));
    }
}
