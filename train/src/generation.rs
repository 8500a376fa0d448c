//! [`GenerateConfig`]: a saved model continues a prompt, or chats.

use std::io::Write;
#[cfg(feature = "chat")]
use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;

use phalanx_nn::SampleOptions;
#[cfg(feature = "chat")]
use phalanx_nn::models::{Decoder, GenerationEnd, generate_rows, load_model};
use phalanx_nn::models::{Generation, GenerationStep, has_weights, read_config};
#[cfg(feature = "chat")]
use phalanx_nn::{Parameters, Scope, pack_weights};
use phalanx_parallel::hybrid::Layout;
use phalanx_tensor::DType;
#[cfg(feature = "chat")]
use phalanx_tensor::Device;

use crate::rank_generation::generate_saved;
#[cfg(feature = "chat")]
use crate::text::{Chat, Message};
use crate::text::{Codec, end_tokens};
use crate::{Error, Result, keyed};

/// The folders of a run's last model, and of its best one.
pub const MODEL_FOLDERS: [&str; 2] = ["model", "best-model"];

keyed! {
    /// What continues a prompt, and how.
    pub struct GenerateConfig {
        /// Hugging Face folder of the model; the `model` folder of a training run, or the run's folder itself.
        "model" model: Option<PathBuf> = None,
        /// Take the weights with the run's lowest validation loss, which `keep-best` has kept.
        "best" best: bool = false,
        /// Text to continue; in a chat what is said.
        "prompt" prompt: String = String::new(),
        /// Chat by the folder's template: with `prompt` one answer, without it as many as there are lines of input.
        "chat" chat: bool = false,
        /// What a chat begins with.
        "system" system: Option<String> = None,
        /// Tokens to make; in a chat the most that an answer has.
        "tokens" tokens: usize = 300,
        /// Divides the logits; 0 takes the likeliest token always.
        "temperature" temperature: f64 = 0.8,
        /// Draw among that many likeliest tokens; 0 for all.
        "top-k" top_k: usize = 40,
        /// Draw among the likeliest tokens whose probabilities together reach this; 1 for all.
        "top-p" top_p: f64 = 1.0,
        /// Draw among tokens of at least this share of the likeliest one's probability; 0 for all.
        "min-p" min_p: f64 = 0.0,
        /// Divides the scores of tokens that are there already; 1 for none.
        "repetition-penalty" repetition_penalty: f64 = 1.0,
        /// A text that ends the continuation, or an answer.
        "stop" stop: Option<String> = None,
        /// Seed of the draws.
        "seed" seed: u64 = 1,
        /// Type of weights and activations; bf16 reads half of the memory.
        "dtype" dtype: DType = DType::F32,
        /// Ranks that split each layer of the model.
        "tp" tp: usize = 1,
        /// Ranks among which the layers are divided.
        "pp" pp: usize = 1,
    }
}

impl GenerateConfig {
    /// Writes the prompt with its continuation to the output, or chats. A chat reads what is said from the input, a line each. `tell` gets the
    /// first error of several ranks ([`start`](crate::start)).
    ///
    /// # Errors
    /// If settings make no sense, the folder has no such model, tokenizer or template, or a conversation is longer than the model's context.
    pub fn run(&self, tell: impl Fn(&str)) -> Result<()> {
        if self.chat {
            if self.tp * self.pp != 1 {
                return refuse("`chat` is of one rank, and `tp` or `pp` asks for more".into());
            }
            return self.chat_on_terminal();
        }
        self.continue_prompt(&mut std::io::stdout(), tell)
    }

    /// Writes the prompt and what continues it, as it comes, in the process of the first rank.
    fn continue_prompt(&self, output: &mut (dyn Write + Send), tell: impl Fn(&str)) -> Result<()> {
        if self.system.is_some() {
            return refuse("`system` goes with `chat`, which is not given".into());
        }
        let folder = self.folder()?;
        let codec = Codec::of(&folder)?;
        let prompt = codec.encode_prompt(self.prompt.as_bytes(), read_config(&folder)?.vocabulary())?;
        if prompt.is_empty() {
            return refuse(format!("{}: the prompt {:?} has no tokens", codec.source(), self.prompt));
        }
        let ends = end_tokens(&folder)?;
        let stop: Vec<&str> = self.stop.as_deref().into_iter().collect();
        let text = |tokens: &[u32]| codec.decode(tokens).unwrap_or_default();
        let generation = || {
            let generation = Generation::new(self.tokens).with_sampling(self.sampling());
            generation.with_end_tokens(&ends).with_text(text, &stop)
        };
        let layout = Layout { tp: self.tp, pp: self.pp, ..Layout::default() };
        let mut written = Written { output, held: self.prompt.clone() };
        let sink = |step: GenerationStep<'_>| written.write(step.text);
        let prompts = std::slice::from_ref(&prompt);
        if let Some(rows) = generate_saved(&folder, layout, self.dtype, prompts, generation, sink, tell)? {
            let _ = written.write("") && writeln!(written.output).is_ok();
            // An error that the text as it came could not tell.
            rows.iter().try_for_each(|row| codec.decode(&row.tokens).map(drop))?;
        }
        Ok(())
    }

    fn sampling(&self) -> SampleOptions {
        SampleOptions {
            temperature: self.temperature,
            top_k: (self.top_k > 0).then_some(self.top_k),
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        }
    }

    /// The model's folder.
    fn folder(&self) -> Result<PathBuf> {
        let Some(folder) = &self.model else {
            return refuse("`model` is not given, wanted a model's folder".into());
        };
        if self.prompt.is_empty() && !self.chat {
            return refuse("`prompt` is empty, wanted at least one character".into());
        }
        if !(0.0..f64::INFINITY).contains(&self.temperature) {
            return refuse(format!("`temperature` is {}, wanted a number from 0 up", self.temperature));
        }
        let inner = folder.join(MODEL_FOLDERS[usize::from(self.best)]);
        let is_model = has_weights(folder) || !inner.exists();
        Ok(if is_model && !self.best { folder.clone() } else { inner })
    }

    #[cfg(not(feature = "chat"))]
    fn chat_on_terminal(&self) -> Result<()> {
        refuse(
            "`chat`: this build has no chat templates; one that has: a build with `--features chat`".into(),
        )
    }

    #[cfg(feature = "chat")]
    fn chat_on_terminal(&self) -> Result<()> {
        let (input, terminal) = (std::io::stdin(), std::io::stdin().is_terminal());
        let mark = || {
            if terminal {
                let _ = write!(std::io::stderr(), "> ");
            }
        };
        let note = |text: &str| drop(writeln!(std::io::stderr(), "({text})"));
        self.chat_with(&mut input.lock(), &mut std::io::stdout(), &mark, &note)
    }

    /// Answers the prompt, or each line of `input`, into `output`. `mark` is called before a line is read; `note` gets what is no part of an
    /// answer, such as why one was cut.
    #[cfg(feature = "chat")]
    fn chat_with(
        &self,
        input: &mut dyn BufRead,
        output: &mut dyn Write,
        mark: &dyn Fn(),
        note: &dyn Fn(&str),
    ) -> Result<()> {
        let folder = self.folder()?;
        let (_, model) = load_model(&folder, &Scope::new(0, self.dtype, Device::CPU))?;
        pack_weights(&model.parameters())?;
        let mut chat = Chat::of(&folder)?;
        if let Some(system) = &self.system {
            chat = chat.with(Message::new("system", system));
        }
        if !self.prompt.is_empty() {
            return self.turn(&mut chat, &model, &self.prompt, output, note).map(drop);
        }
        let mut line = String::new();
        loop {
            mark();
            line.clear();
            if input.read_line(&mut line).map_err(|e| Error::Config(format!("chat: the input: {e}")))? == 0 {
                return Ok(());
            }
            let said = line.trim();
            if !said.is_empty() && !self.turn(&mut chat, &model, said, output, note)? {
                return Ok(());
            }
        }
    }

    /// One answer, written as it comes. Returns whether the output takes more.
    #[cfg(feature = "chat")]
    fn turn(
        &self,
        chat: &mut Chat,
        model: &Decoder,
        said: &str,
        output: &mut dyn Write,
        note: &dyn Fn(&str),
    ) -> Result<bool> {
        let (prompt, context) = (chat.ask(said, model.vocabulary())?, model.context());
        let room = context.saturating_sub(prompt.len());
        if room == 0 {
            let got = prompt.len();
            return refuse(format!(
                "chat: got a conversation of {got} tokens, wanted fewer than the model's context of {context}"
            ));
        }
        let stop: Vec<&str> = chat.end_text().into_iter().chain(self.stop.as_deref()).collect();
        let seed = self.seed.wrapping_add(chat.messages().len() as u64);
        let generation = Generation::new(self.tokens.min(room))
            .with_sampling(SampleOptions { seed, ..self.sampling() })
            .with_end_tokens(chat.end_tokens())
            .with_text(|tokens| chat.codec().decode(tokens).unwrap_or_default(), &stop);
        let mut taken = true;
        let mut answers = generate_rows(model, &[prompt], generation, |step| {
            taken = taken && write!(output, "{}", step.text).and_then(|()| output.flush()).is_ok();
            taken
        })?;
        taken = taken && writeln!(output).is_ok();
        let Some(answer) = answers.pop() else { return Ok(taken) };
        if answer.end == GenerationEnd::Count {
            note(&match self.tokens <= room {
                true => format!("cut after {} tokens (`tokens`)", self.tokens),
                false => format!("cut, since the conversation fills the model's context of {context} tokens"),
            });
        }
        chat.answered(answer.text);
        Ok(taken)
    }
}

/// A text that is written as it comes, but for the ends of lines at its end.
struct Written<'a> {
    output: &'a mut (dyn Write + Send),
    /// What is written with the next text.
    held: String,
}

impl Written<'_> {
    /// Returns whether the output takes more: a reader that has closed the pipe wants no more of it.
    fn write(&mut self, text: &str) -> bool {
        self.held += text;
        let line_ends = self.held.split_off(self.held.trim_end_matches('\n').len());
        let text = std::mem::replace(&mut self.held, line_ends);
        write!(self.output, "{text}").and_then(|()| self.output.flush()).is_ok()
    }
}

fn refuse<T>(why: String) -> Result<T> {
    Err(Error::Config(why))
}

#[cfg(all(test, feature = "chat"))]
mod tests {
    use std::cell::RefCell;
    use std::path::Path;

    use phalanx_nn::models::{LlamaConfig, ModelConfig, Sampling, generate, save_model};

    use super::*;

    const TEMPLATE: &str = "{% for m in messages %}{{ m.role[:1] }}{{ m.content }};\n{% endfor %}{% if add_generation_prompt %}a{% endif %}";

    /// A folder of a model that has learned nothing, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("phalanx-generation-{name}-{}", std::process::id()));
            let config = ModelConfig::Llama(LlamaConfig::new(256, 48, 2, 2, 16));
            let model = config.init(&Scope::new(3, DType::F32, Device::CPU)).unwrap();
            save_model(&model, &config, &path).unwrap();
            std::fs::write(path.join("chat_template.jinja"), TEMPLATE).unwrap();
            Folder(path)
        }

        fn end_tokens(&self, tokens: &[u32]) {
            let text = format!("{{\"eos_token_id\": {tokens:?}}}");
            std::fs::write(self.0.join("generation_config.json"), text).unwrap();
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn config(folder: &Path) -> GenerateConfig {
        let model = Some(folder.to_path_buf());
        GenerateConfig { model, chat: true, tokens: 5, temperature: 0.0, ..GenerateConfig::default() }
    }

    /// What a chat writes, and its notes.
    fn chat(config: &GenerateConfig, input: &str) -> (Result<()>, String, Vec<String>) {
        let (mut output, notes) = (Vec::new(), RefCell::new(Vec::new()));
        let note = |text: &str| notes.borrow_mut().push(text.to_string());
        let done = config.chat_with(&mut input.as_bytes(), &mut output, &|| {}, &note);
        (done, String::from_utf8(output).unwrap(), notes.into_inner())
    }

    /// The tokens that the model finds likeliest behind a text, as many as wanted.
    fn likeliest(config: &GenerateConfig, text: &str, count: usize) -> Vec<u32> {
        let scope = Scope::new(0, DType::F32, Device::CPU);
        let (_, model) = load_model(config.folder().unwrap(), &scope).unwrap();
        let (prompt, mut tokens) = (text.bytes().map(u32::from).collect::<Vec<_>>(), Vec::new());
        let how = Sampling { temperature: 0.0, ..Sampling::default() };
        let sink = |token| {
            tokens.push(token);
            true
        };
        generate(&model, &prompt, count, how, sink).unwrap();
        tokens
    }

    fn text(tokens: &[u32]) -> String {
        Codec::Bytes(None).decode(tokens).unwrap()
    }

    /// What a prompt and its continuation are.
    fn continued(config: &GenerateConfig) -> (Result<()>, String) {
        let mut output = Vec::new();
        let done = config.continue_prompt(&mut output, |_| ());
        (done, String::from_utf8(output).unwrap())
    }

    #[test]
    fn a_prompt_is_continued_by_every_rule_of_drawing() {
        let folder = Folder::new("continued");
        let greedy = GenerateConfig { chat: false, prompt: "hi".into(), ..config(&folder.0) };
        let written = |config: &GenerateConfig| {
            let (done, text) = continued(config);
            done.unwrap();
            text
        };
        let whole = written(&greedy);
        assert_eq!(whole, format!("hi{}\n", text(&likeliest(&greedy, "hi", 5)).trim_end_matches('\n')));
        assert_eq!(written(&GenerateConfig { tokens: 0, prompt: "a\n\n".into(), ..greedy.clone() }), "a\n");
        for one in [
            GenerateConfig { top_k: 1, temperature: 1.0, ..greedy.clone() },
            GenerateConfig { top_p: 1e-9, top_k: 0, temperature: 1.0, ..greedy.clone() },
            GenerateConfig { min_p: 1.0, top_k: 0, temperature: 1.0, ..greedy.clone() },
            GenerateConfig { tp: 2, ..greedy.clone() },
        ] {
            assert_eq!(written(&one), whole);
        }
        let penalty = GenerateConfig { repetition_penalty: 1e6, tokens: 40, top_k: 0, ..greedy.clone() };
        let tokens = |config: &GenerateConfig| {
            let (_, model) = load_model(&folder.0, &Scope::new(0, config.dtype, Device::CPU)).unwrap();
            let generation = Generation::new(config.tokens).with_sampling(config.sampling());
            let prompt: Vec<u32> = config.prompt.bytes().map(u32::from).collect();
            generate_rows(&model, &[prompt], generation, |_| true).unwrap().remove(0).tokens
        };
        let line = |tokens: &[u32]| format!("hi{}\n", text(tokens).trim_end_matches('\n'));
        let unlike = tokens(&penalty);
        assert!((1..40).all(|i| !unlike[..i].contains(&unlike[i])), "{unlike:?}");
        assert_eq!(written(&penalty), line(&unlike));
        // A prompt behind which bf16's likeliest tokens are not f32's.
        let prompts = ('a'..='z').map(|prompt| GenerateConfig { prompt: prompt.into(), ..penalty.clone() });
        let both = |floats: GenerateConfig| (GenerateConfig { dtype: DType::BF16, ..floats.clone() }, floats);
        let other = prompts.map(both).find(|(halves, floats)| tokens(halves) != tokens(floats));
        let (halves, floats) = other.expect("one of 26 prompts");
        let end = text(&tokens(&halves));
        assert_eq!(written(&halves), format!("{}{}\n", halves.prompt, end.trim_end_matches('\n')));
        assert_ne!(written(&halves), written(&floats));
        let at = unlike.iter().position(|token| (33..127).contains(token)).expect("a printable byte");
        let stop = Some(char::from(unlike[at] as u8).into());
        assert_eq!(written(&GenerateConfig { stop, ..penalty }), line(&unlike[..at]));
        // A reader that has closed the pipe.
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        greedy.continue_prompt(&mut Closed, |_| ()).unwrap();
    }

    /// A tokenizer like Llama 2's, whose texts do not begin with the space that its first token has.
    #[test]
    #[cfg(feature = "tokenizers")]
    fn a_continuation_has_the_space_of_its_first_word() {
        let folder = Folder::new("spaces");
        let words: Vec<String> = (0..256).map(|token| format!(r#""▁w{token}": {token}"#)).collect();
        let metaspace = r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}"#;
        let text = format!(
            r#"{{"version": "1.0", "added_tokens": [], "pre_tokenizer": {metaspace}, "decoder": {metaspace},
                "model": {{"type": "WordLevel", "vocab": {{{}}}, "unk_token": "▁w0"}}}}"#,
            words.join(", ")
        );
        std::fs::write(folder.0.join("tokenizer.json"), text).unwrap();
        let config = GenerateConfig { chat: false, prompt: "w104 w105".into(), ..config(&folder.0) };
        let words: String = likeliest(&config, "hi", 5).iter().map(|token| format!(" w{token}")).collect();
        assert_eq!(continued(&config).1, format!("w104 w105{words}\n"));
    }

    #[test]
    fn each_line_is_answered_behind_all_that_was_said_before() {
        let folder = Folder::new("turns");
        let config = config(&folder.0);
        let first = text(&likeliest(&config, "uhi;\na", 5));
        let second = text(&likeliest(&config, &format!("uhi;\na{first};\nub;\na"), 5));
        let (done, said, notes) = chat(&config, "hi\n\n  b \n");
        done.unwrap();
        assert_eq!(said, format!("{first}\n{second}\n"));
        assert_eq!(notes, ["cut after 5 tokens (`tokens`)"; 2]);
        // One answer to a prompt, behind the system's message.
        let system = GenerateConfig { system: Some("S".into()), prompt: "hi".into(), ..config.clone() };
        let (done, said, _) = chat(&system, "not read\n");
        done.unwrap();
        assert_eq!(said, format!("{}\n", text(&likeliest(&config, "sS;\nuhi;\na", 5))));
    }

    #[test]
    fn answers_end_at_end_tokens_and_at_the_templates_end_of_a_turn() {
        let folder = Folder::new("ends");
        let config = GenerateConfig { prompt: "hi".into(), ..config(&folder.0) };
        let tokens = likeliest(&config, "uhi;\na", 5);
        let third = tokens.iter().position(|token| *token == tokens[2]).unwrap();
        folder.end_tokens(&[1000, tokens[2]]);
        let (done, said, notes) = chat(&config, "");
        done.unwrap();
        assert_eq!((said, notes), (text(&tokens[..third]) + "\n", vec![]));
        // A turn that ends with what the model writes: the template is found by the model's own words.
        folder.end_tokens(&[]);
        let end = (33..127u8).find(|&end| {
            let tokens = likeliest(&config, &format!("uhi{}\na", char::from(end)), 5);
            tokens.contains(&end.into())
        });
        let end = char::from(end.expect("a character that the model repeats"));
        let template = TEMPLATE.replace(";", &end.to_string());
        std::fs::write(folder.0.join("chat_template.jinja"), template).unwrap();
        let tokens = likeliest(&config, &format!("uhi{end}\na"), 5);
        let at = tokens.iter().position(|&token| token == end as u32).unwrap();
        let (done, said, notes) = chat(&config, "");
        done.unwrap();
        assert_eq!((said, notes), (text(&tokens[..at]) + "\n", vec![]));
    }

    #[test]
    fn a_conversation_does_not_outgrow_the_context_silently() {
        let folder = Folder::new("long");
        let config = GenerateConfig { tokens: 100, ..config(&folder.0) };
        let (done, said, notes) = chat(&config, "hi\nmore\n");
        let error = done.unwrap_err().to_string();
        assert_eq!(notes, ["cut, since the conversation fills the model's context of 48 tokens"]);
        assert_eq!(said, text(&likeliest(&config, "uhi;\na", 48 - 6)) + "\n");
        assert!(error.contains("wanted fewer than the model's context of 48"), "{error}");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let folder = Folder::new("wrong");
        let plain = GenerateConfig { chat: false, ..config(&folder.0) };
        let system = GenerateConfig { system: Some("S".into()), prompt: "x".into(), ..plain.clone() };
        let refused = |config: &GenerateConfig| continued(config).0.unwrap_err().to_string();
        assert!(refused(&plain).starts_with("`prompt` is empty"));
        assert!(refused(&system).starts_with("`system` goes with `chat`"));
        let prompt = GenerateConfig { prompt: "x".into(), ..plain };
        assert!(refused(&GenerateConfig { top_p: 2.0, ..prompt.clone() }).contains("top_p of 2"));
        assert!(
            refused(&GenerateConfig { stop: Some(String::new()), ..prompt }).contains("empty stop string")
        );
        std::fs::remove_file(folder.0.join("chat_template.jinja")).unwrap();
        let error = chat(&config(&folder.0), "hi").0.unwrap_err().to_string();
        assert!(error.contains("got no chat template"), "{error}");
    }
}
