//! What generation promises: a row is as it is alone, text comes as soon as it is certain, and memory follows the rows.

use std::cell::{Cell, RefCell};

use phalanx_tensor::{Device, Tensor};

use super::*;
use crate::models::tests::{all, build};
use crate::models::{DecoderStage, KvCache, LlamaConfig, ModelConfig, RowPart, RowTokens};
use crate::{Parameter, Parameters, Scope};

const GREEDY: SampleOptions =
    SampleOptions { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 };

/// Prompts of 1 to 15 tokens, for a context of 12.
fn prompts() -> Vec<Vec<u32>> {
    let lengths = [3, 1, 15, 7, 12];
    lengths
        .iter()
        .enumerate()
        .map(|(row, n)| (0..*n).map(|i| (i * 7 + row as u32 * 11) % 37).collect())
        .collect()
}

/// Whole forward passes over each row alone, at most so many positions long, without a cache.
fn by_whole_passes(model: &Decoder, prompt: &[u32], count: usize, context: usize) -> Vec<u32> {
    let _inference = inference();
    let mut row = prompt.to_vec();
    let mut from = row.len().saturating_sub(context);
    for _ in 0..count {
        if row.len() - from > context {
            from = row.len() - context.div_ceil(2);
        }
        let seen: Vec<i64> = row[from..].iter().map(|&token| i64::from(token)).collect();
        let seen = Var::from_slice(&seen, &[1, seen.len()], Device::CPU).unwrap();
        let logits = model.logits(&model.forward(&seen).unwrap()).unwrap();
        let scores = logits.to(DType::F64).unwrap().to_vec::<f64>().unwrap();
        let scores = &scores[scores.len() - model.vocabulary()..];
        row.push((0..scores.len()).fold(0, |best, i| if scores[i] > scores[best] { i } else { best }) as u32);
    }
    row.split_off(prompt.len())
}

#[test]
fn sampling_means_the_options_of_the_same_names() {
    let options = SampleOptions::from(Sampling { temperature: 0.5, top_k: 0, seed: 3 });
    assert_eq!(options, SampleOptions { temperature: 0.5, seed: 3, ..SampleOptions::default() });
    assert_eq!(SampleOptions::from(Sampling { top_k: 2, ..Sampling::default() }).top_k, Some(2));
}

/// The scores of each step, and the tokens, of rows that are continued together.
fn traced(model: &Decoder, prompts: &[Vec<u32>], piece: usize) -> (Vec<Vec<Vec<f64>>>, Vec<Vec<u32>>) {
    traced_by(model, prompts, Generation { piece, page: 2, ..Generation::new(9) })
}

fn traced_by(
    model: &Decoder,
    prompts: &[Vec<u32>],
    generation: Generation<'_>,
) -> (Vec<Vec<Vec<f64>>>, Vec<Vec<u32>>) {
    let mut scores = vec![Vec::new(); prompts.len()];
    let generation = generation
        .with_sampling(GREEDY)
        .with_processor(|row, _, of_row: &mut [f64]| scores[row].push(of_row.to_vec()));
    let rows = generate_rows(model, prompts, generation, |_| true).unwrap();
    (scores, rows.into_iter().map(|row| row.tokens).collect())
}

#[test]
fn rows_of_unlike_length_have_the_bits_that_they_have_alone() {
    let prompts = prompts();
    for (i, config) in all(0.1).iter().enumerate() {
        for (dtype, piece) in [(DType::F32, 4), (DType::BF16, 512)] {
            let model = build(config, dtype, Device::CPU);
            let (scores, tokens) = traced(&model, &prompts, piece);
            for (row, prompt) in prompts.iter().enumerate() {
                let alone = traced(&model, std::slice::from_ref(prompt), piece);
                assert!(alone.0[0] == scores[row], "model {i}, {dtype}, row {row}");
                assert_eq!(alone.1[0], tokens[row]);
            }
        }
    }
}

#[test]
fn weights_in_panels_change_no_bit() {
    let prompts = prompts();
    for (i, config) in all(0.1).iter().enumerate() {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let model = build(config, dtype, Device::CPU);
            let wanted = traced(&model, &prompts, 4);
            let values = || {
                let bytes = |p: Parameter| p.values().unwrap().to_bytes().unwrap();
                model.parameters().into_iter().map(bytes).collect::<Vec<_>>()
            };
            let before = values();
            crate::pack_weights(&model.parameters()).unwrap();
            let is_packed = model.parameters().iter().any(Parameter::is_packed);
            assert!(is_packed || dtype == DType::BF16, "model {i}, {dtype}");
            assert!(traced(&model, &prompts, 4) == wanted, "model {i}, {dtype}");
            assert!(values() == before, "model {i}, {dtype}");
        }
    }
}

#[test]
fn prompts_of_many_tiles_of_keys_have_the_bits_that_they_have_alone() {
    let llama = LlamaConfig { key_heads: 1, ..LlamaConfig::new(37, 300, 2, 2, 16) };
    let model = build(&ModelConfig::Llama(llama), DType::F32, Device::CPU);
    let prompts = [70, 150, 100, 9].map(|n: u32| (0..n).map(|i| i * i % 37).collect::<Vec<u32>>());
    let (scores, _) = traced(&model, &prompts, 96);
    for (row, prompt) in prompts.iter().enumerate() {
        assert!(traced(&model, std::slice::from_ref(prompt), 96).0[0] == scores[row], "row {row}");
    }
}

#[test]
fn rows_have_the_tokens_of_whole_passes() {
    let prompts = &prompts()[..3];
    for config in all(0.1) {
        let model = build(&config, DType::F64, Device::CPU);
        let by = |context| {
            prompts.iter().map(|prompt| by_whole_passes(&model, prompt, 9, context)).collect::<Vec<_>>()
        };
        assert_eq!(traced(&model, prompts, 5).1, by(12));
        // A context of the caller's: shorter than the model's, and longer, which learned positions do not allow.
        let generation =
            |context| Generation { piece: 5, page: 2, ..Generation::new(9).with_context(context) };
        assert_eq!(traced_by(&model, prompts, generation(7)).1, by(7));
        if let ModelConfig::Gpt(_) = config {
            let refused = generate_rows(&model, prompts, generation(40), |_| true).unwrap_err().to_string();
            assert!(
                refused.contains("a context of 40 positions, wanted at most the model's 12 learned ones"),
                "{refused}"
            );
        } else {
            assert_eq!(traced_by(&model, prompts, generation(40)).1, by(40));
        }
    }
}

/// Tokens 0 to 25 are letters; 26 and 27 are the two bytes of a character, of which one alone is unreadable; 29 is several letters.
fn letters(tokens: &[u32]) -> String {
    let bytes = tokens.iter().flat_map(|&token| match token {
        0..26 => vec![b'a' + token as u8],
        26 => vec![0xc3],
        27 => vec![0xa9],
        29 => b"aba".to_vec(),
        _ => b" ".to_vec(),
    });
    String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
}

/// A processor that lets a row draw the tokens of a script only.
fn script(scripts: Vec<Vec<u32>>, prompt: usize) -> impl FnMut(usize, &[u32], &mut [f64]) {
    move |row, all, scores| {
        let wanted = scripts[row][all.len() - prompt] as usize;
        scores
            .iter_mut()
            .enumerate()
            .filter(|(token, _)| *token != wanted)
            .for_each(|(_, s)| *s = f64::NEG_INFINITY);
    }
}

fn tokens_of(text: &str) -> Vec<u32> {
    let of = |c: char| {
        if c == 'é' {
            vec![26, 27]
        } else if c == ' ' {
            vec![28]
        } else {
            vec![c as u32 - 'a' as u32]
        }
    };
    text.chars().flat_map(of).collect()
}

/// One row that writes these tokens: what is given after each of them, and the result.
fn written(tokens: Vec<u32>, stop: &[&str]) -> (Vec<String>, Generated) {
    let model = build(&all(0.0)[1], DType::F32, Device::CPU);
    let generation = Generation::new(tokens.len()).with_text(letters, stop);
    let generation = generation.with_processor(script(vec![tokens], 1));
    let mut given = Vec::new();
    let rows = generate_rows(&model, &[[5u32]], generation, |step| {
        given.push(step.text.to_string());
        true
    });
    let row = rows.unwrap().remove(0);
    assert_eq!(given.concat(), row.text);
    (given, row)
}

#[test]
fn text_is_held_back_while_it_may_begin_a_stop_string() {
    let (given, row) = written(tokens_of("xenon end abc"), &["end"]);
    assert_eq!(given, ["x", "", "", "eno", "n", " ", "", "", ""].map(String::from).to_vec());
    assert_eq!((row.text.as_str(), row.end), ("xenon ", GenerationEnd::Stop(0)));
    assert_eq!(row.tokens, tokens_of("xenon end"));
    // The end of a row gives what was held back.
    let (given, row) = written(tokens_of("ab en"), &["end"]);
    assert_eq!(given, ["a", "b", " ", "", "en"].map(String::from).to_vec());
    assert_eq!(row.end, GenerationEnd::Count);
    // A character of two tokens is given whole, and its bytes may end a text.
    let (given, row) = written(tokens_of("aéb"), &["zz"]);
    assert_eq!((given, row.end), (["a", "", "é", "b"].map(String::from).to_vec(), GenerationEnd::Count));
    assert_eq!(written(tokens_of("éaéé"), &["aé"]).1.text, "é");
}

#[test]
fn stop_strings_end_a_text_where_a_search_by_bytes_ends_it() {
    let letters = ["a", "b", "é"];
    let stops: [&[&str]; 5] =
        [&["ab"], &["aba", "b"], &["abab", "ba"], &["éa", "aé", "bbb"], &["aab", "ab", "b"]];
    for n in 0..81 {
        let text: String = (0..4).map(|i| letters[n / 3usize.pow(i) % 3]).collect();
        for stop in stops {
            // The first end of a stop string, by bytes.
            let first = (0..=text.len()).find_map(|end| {
                let ends = |stop: &&str| text.as_bytes()[..end].ends_with(stop.as_bytes());
                let longest = stop.iter().filter(|stop| ends(stop)).map(|stop| stop.len()).max()?;
                Some(&text[..end - longest])
            });
            let mut tokens = tokens_of(&text);
            if text.starts_with("aba") {
                tokens.splice(..3, [29]);
            }
            assert_eq!(written(tokens, stop).1.text, first.unwrap_or(&text), "{text:?} {stop:?}");
        }
    }
}

#[test]
fn rows_end_by_themselves_and_the_others_go_on() {
    let model = build(&all(0.0)[3], DType::F32, Device::CPU);
    let scripts = vec![vec![3, 4, 30, 9], vec![1; 6], vec![8; 6], vec![31; 6], tokens_of("a stop")];
    let generation = || {
        let plain = Generation::new(6).with_end_tokens(&[30, 31]).with_text(letters, &["zz", "stop"]);
        plain.with_processor(script(scripts.clone(), 2))
    };
    let mut steps: Vec<(usize, Option<u32>)> = Vec::new();
    let rows = generate_rows(&model, &[[1u32, 2]; 5], generation(), |step| {
        steps.push((step.row, step.token));
        !(step.row == 2 && steps.len() > 5)
    });
    let rows = rows.unwrap();
    let ends: Vec<_> = rows.iter().map(|row| (row.tokens.len(), row.end)).collect();
    use GenerationEnd::*;
    assert_eq!(ends, [(2, Token(30)), (6, Count), (2, Callback), (0, Token(31)), (6, Stop(1))]);
    assert_eq!(rows[4].text, "a ");
    let of = |row: usize| steps.iter().filter(|step| step.0 == row).map(|step| step.1).collect::<Vec<_>>();
    assert_eq!(of(0), [Some(3), Some(4), None]);
    assert_eq!((of(1).len(), of(2).len(), of(3)), (6, 2, vec![None]));
    // Tokens come as they are drawn, a step of all rows after the other.
    assert_eq!(steps.iter().take(8).map(|step| step.0).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 0, 1, 2]);
    let none =
        generate_rows(&model, &[[1u32]], Generation::new(0), |_| panic!("a step of no tokens")).unwrap();
    assert_eq!(none, [Generated { tokens: vec![], text: String::new(), end: Count }]);
    assert!(generate_rows(&model, &[[1u32]; 0], generation(), |_| true).unwrap().is_empty());
}

#[test]
fn draws_are_functions_of_the_seed_and_the_row() {
    let model = build(&all(0.0)[1], DType::F32, Device::CPU);
    let sampling = SampleOptions {
        seed: 4,
        min_p: 0.05,
        top_p: 0.95,
        repetition_penalty: 1.2,
        ..SampleOptions::default()
    };
    let run = |prompts: &[[u32; 2]]| {
        let generation = Generation::new(10).with_sampling(sampling);
        let rows = generate_rows(&model, prompts, generation, |_| true).unwrap();
        rows.into_iter().map(|row| row.tokens).collect::<Vec<_>>()
    };
    let rows = run(&[[1, 2]; 3]);
    assert!(rows == run(&[[1, 2]; 3]) && rows[..1] == run(&[[1, 2]]) && rows[0] != rows[1]);
    let mut former = Vec::new();
    generate_with(&model, &[1, 2], 10, sampling, |token| {
        former.push(token);
        true
    })
    .unwrap();
    assert_eq!(former, rows[0]);
    // A penalty this large lets no token come twice.
    let greedy = SampleOptions { repetition_penalty: 1e30, ..GREEDY };
    let rows =
        generate_rows(&model, &[[1u32, 2]; 2], Generation::new(20).with_sampling(greedy), |_| true).unwrap();
    for row in rows {
        let mut seen = [vec![1, 2], row.tokens].concat();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 22);
    }
}

#[test]
fn what_cannot_be_continued_is_refused_by_name() {
    let model = build(&all(0.0)[1], DType::F32, Device::CPU);
    let said = |prompts: &[&[u32]], generation: Generation<'_>, part: &str| {
        let text = generate_rows(&model, prompts, generation, |_| true).unwrap_err().to_string();
        assert!(text.starts_with("generate: ") && text.contains(part), "{text:?} lacks {part:?}");
    };
    said(&[&[1], &[]], Generation::new(3), "row 1: the prompt is empty");
    said(&[&[1, 37]], Generation::new(3), "token 37 of the prompt is not below the vocabulary 37");
    said(&[&[1]], Generation::new(3).with_text(letters, &["a", ""]), "empty stop string");
    said(&[&[1]], Generation { stop: vec!["a".into()], ..Generation::new(3) }, "wanted `Generation::text`");
    said(&[&[1]], Generation::new(3).with_context(0), "a context of 0");
    said(&[&[1]], Generation { piece: 0, ..Generation::new(3) }, "pieces of 0");
    said(&[&[1]], Generation { page: 0, ..Generation::new(3) }, "pages of 0");
    said(&[&[1]], Generation::new(3).with_sampling(SampleOptions { min_p: 2.0, ..GREEDY }), "min_p of 2");
    let hidden = |_: usize, _: &[u32], scores: &mut [f64]| scores.fill(f64::NEG_INFINITY);
    said(&[&[1]], Generation::new(3).with_processor(hidden), "none of the 37 scores");
    let mut caches = model.row_caches(4).unwrap();
    let refused = |caches: &mut [KvCache], tokens: &[i64], part: &str| {
        let text = model.extend_rows(&mut [(caches, tokens)]).map(drop).unwrap_err().to_string();
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    };
    refused(&mut caches, &[], "got 0 tokens of row 0");
    refused(&mut caches[1..], &[1], "got 2 caches of row 0, wanted 3");
    refused(&mut model.caches(1, 2).unwrap(), &[1; 3], "with room for the new tokens");
    let x = Var::from_slice(&[0f32; 48], &[1, 3, 16], Device::CPU).unwrap();
    let mut parts = [RowPart { cache: &mut caches[0], count: 2 }];
    let text = model.blocks()[0].module().extend_rows(&x, &mut parts).unwrap_err().to_string();
    assert!(text.contains("for rows of 2 positions"), "{text}");
    assert!(model.extend_rows(&mut []).unwrap_err().to_string().contains("got no rows"));
    let learned = build(&all(0.0)[0], DType::F32, Device::CPU);
    let text =
        learned.extend_rows(&mut [(&mut learned.row_caches(4).unwrap(), &[1; 13])]).unwrap_err().to_string();
    assert!(
        text.contains("got 13 tokens of row 0 after 0 positions, wanted at least 1 and at most 12"),
        "{text}"
    );
}

/// A model whose calls are begun before the tokens of earlier ones are known, as those of a pipeline's stage are.
struct Ahead<'a> {
    model: &'a Decoder,
    groups: usize,
    calls: usize,
    /// The tokens of each row of each call, in the order in which calls begin.
    begun: RefCell<Vec<Vec<Vec<i64>>>>,
    /// Calls that draw and whose tokens are not known, now and at most.
    open: Cell<usize>,
    most: Cell<usize>,
}

impl CausalModel for Ahead<'_> {
    type Error = Error;

    fn context(&self) -> usize {
        self.model.context()
    }

    fn vocabulary(&self) -> usize {
        self.model.vocabulary()
    }

    fn turning_point(&self) -> Option<usize> {
        self.model.turning_point()
    }

    fn row_caches(&self, page: usize) -> Result<Vec<KvCache>> {
        self.model.row_caches(page)
    }

    fn extend_rows(&self, rows: &mut [RowTokens<'_>]) -> Result<Option<Var>> {
        self.begun.borrow_mut().push(rows.iter().map(|row| row.tokens.to_vec()).collect());
        self.open.set(self.open.get() + 1);
        self.most.set(self.most.get().max(self.open.get()));
        CausalModel::extend_rows(self.model, rows)
    }

    fn groups(&self) -> usize {
        self.groups
    }

    fn calls_under_way(&self) -> usize {
        self.calls
    }

    fn agreed_tokens(&self, drawn: Option<Result<Vec<u32>>>, count: usize) -> Result<Vec<u32>> {
        self.open.set(self.open.get() - 1);
        CausalModel::agreed_tokens(self.model, drawn, count)
    }
}

#[test]
fn stages_that_are_ahead_begin_the_same_calls_in_the_same_order() {
    let model = build(&all(0.0)[1], DType::F32, Device::CPU);
    let sampling = SampleOptions { seed: 2, ..SampleOptions::default() };
    let generation = |piece| {
        let generation = Generation::new(9).with_sampling(sampling).with_end_tokens(&[1, 5, 9, 13]);
        Generation { piece, page: 3, ..generation }
    };
    for piece in [4, 512] {
        let wanted = generate_rows(&model, &prompts(), generation(piece), |_| true).unwrap();
        for groups in [1, 3, 6] {
            let run = |calls: usize| {
                let (begun, open, most) = (RefCell::default(), Cell::new(0), Cell::new(0));
                let ahead = Ahead { model: &model, groups, calls, begun, open, most };
                let rows = generate_rows_by(&ahead, &prompts(), generation(piece), |_| true).unwrap();
                assert!(rows == wanted, "{groups} groups, {calls} calls, pieces of {piece}");
                if piece == 512 {
                    assert_eq!(ahead.most.get(), calls.min(groups).min(prompts().len()));
                }
                ahead.begun.into_inner()
            };
            let last = run(1);
            assert!(
                [2, groups, groups + 2].into_iter().all(|calls| run(calls) == last),
                "{groups} groups, pieces of {piece}"
            );
        }
    }
}

#[test]
fn stages_continue_rows_as_the_whole_does_and_refuse_what_is_not_theirs() {
    let config = &all(0.0)[1];
    let whole = build(config, DType::F32, Device::CPU);
    // Of the whole model's seed.
    let scope = Scope::new(3, DType::F32, Device::CPU);
    let stage = |layers: std::ops::Range<usize>| {
        let part = DecoderStage { first: layers.start == 0, last: layers.end == config.layers(), layers };
        config.init_stage(&std::sync::Arc::new(crate::OneDevice), &scope, part).unwrap()
    };
    let _inference = inference();
    let stages = [stage(0..2), stage(2..config.layers())];
    let mut caches = stages.each_ref().map(|stage| stage.row_caches(4).unwrap());
    let mut of_whole = whole.row_caches(4).unwrap();
    for (before, tokens) in [(0, &[3i64, 4, 5][..]), (3, &[6])] {
        let mut x = None;
        for (stage, caches) in stages.iter().zip(&mut caches) {
            let mut rows = [RowTokens { caches, before, tokens }];
            x = Some(stage.extend_stage(x.as_ref(), &mut rows).unwrap());
        }
        let wanted = whole.extend_rows(&mut [(&mut of_whole, tokens)]).unwrap();
        assert_eq!(x.unwrap().to_vec::<f32>().unwrap(), wanted.to_vec::<f32>().unwrap());
    }
    let mut refused = |of: usize, x: Option<&[usize]>, part: &str| {
        let x = x.map(|shape| Var::new(Tensor::zeros(shape, DType::F32, Device::CPU).unwrap()));
        let mut rows = [RowTokens { caches: &mut caches[of], before: 4, tokens: &[7] }];
        let text = stages[of].extend_stage(x.as_ref(), &mut rows).map(drop).unwrap_err().to_string();
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    };
    refused(0, Some(&[1, 1, 16]), "got a stream for the first stage");
    refused(1, None, "got no stream for a stage without the embedding");
    refused(1, Some(&[1, 2, 16]), "got a stream [1, 2, 16] f32, wanted [1, 1, 16] f32");
    let text = generate_rows(&stages[0], &[[1u32]], Generation::new(1), |_| true).unwrap_err().to_string();
    assert!(text.contains("this stage has no head"), "{text}");
}
