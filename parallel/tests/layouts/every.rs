//! Every layout trains as one device does: a sample of them, and all.

use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::time::Instant;

use crate::case::{Case, all};
use crate::draws::Draws;
use crate::outcome::{Alike, STEPS, alone, assert_same, together};

/// One device's runs, which many layouts share.
#[derive(Default)]
struct Wanted(HashMap<String, Alike>);

impl Wanted {
    fn of(&mut self, case: &Case) -> &Alike {
        let key = format!("{:?} {} {} {}", case.model, case.dtype, case.layout.dp, case.layout.micro_batches);
        self.0.entry(key).or_insert_with(|| alone(case, 0..STEPS))
    }

    fn check(&mut self, case: &Case) {
        assert_same(case, &together(case, 0..STEPS), self.of(case));
    }
}

/// Every two words of a case's name.
fn pairs(case: &Case) -> Vec<(String, String)> {
    let name = case.to_string();
    let words: Vec<&str> = name.split(' ').collect();
    let pair = |(i, a): (usize, &&str)| {
        words[..i].iter().map(|b| (a.to_string(), b.to_string())).collect::<Vec<_>>()
    };
    words.iter().enumerate().flat_map(pair).collect()
}

/// Few cases in which every two values of two axes meet that meet in any: of some drawn ones the one that has the most new
/// pairs, and so on.
fn sample(all: &[Case]) -> Vec<&Case> {
    let mut open: BTreeSet<(String, String)> = all.iter().flat_map(pairs).collect();
    let (mut draws, mut chosen) = (Draws(1), Vec::new());
    while let Some(wanted) = open.first() {
        let has = |case: &&Case| pairs(case).contains(wanted);
        let candidates: Vec<&Case> = all.iter().filter(has).collect();
        let drawn = (0..40).map(|_| candidates[draws.below(candidates.len())]);
        let new = |case: &&Case| pairs(case).iter().filter(|pair| open.contains(pair)).count();
        let best = drawn.max_by_key(new).unwrap();
        let met = pairs(best);
        open.retain(|pair| !met.contains(pair));
        chosen.push(best);
    }
    chosen
}

#[test]
fn a_sample_in_which_all_pairs_of_settings_meet_trains_as_one_device_does() {
    let (all, mut wanted) = (all(), Wanted::default());
    let sample = sample(&all);
    // Without optimisation there is no time for all of them.
    let every = if cfg!(debug_assertions) { 8 } else { 1 };
    sample.into_iter().step_by(every).for_each(|case| wanted.check(case));
}

/// `PHALANX_LAYOUTS`: how many (all), `PHALANX_LAYOUTS_SEED`: which (0), `PHALANX_LAYOUTS_ONLY`: words that their names have.
#[test]
#[ignore = "takes hours"]
fn every_layout() {
    let variable = |name: &str| std::env::var(format!("PHALANX_LAYOUTS{name}")).ok();
    let number = |name: &str| variable(name).map(|text| text.parse::<usize>().expect("a number"));
    let only = variable("_ONLY").unwrap_or_default();
    let mut cases = all();
    cases.retain(|case| only.split_whitespace().all(|word| case.to_string().split(' ').any(|w| w == word)));
    let (count, total) = (number("").unwrap_or(usize::MAX).min(cases.len()), cases.len());
    if count < total {
        let mut draws = Draws(number("_SEED").unwrap_or(0) as u64);
        (0..count).for_each(|i| cases.swap(i, i + draws.below(total - i)));
        cases.truncate(count);
    }
    // Those of one reference together.
    cases.sort_by_key(|case| (case.layout.dp, case.layout.micro_batches));
    let (mut wanted, begin) = (Wanted::default(), Instant::now());
    for (number, case) in cases.iter().enumerate() {
        // Written directly: the test harness shows nothing that a test prints and passes.
        let _ = writeln!(
            std::io::stderr(),
            "{:4.0?} s  {}/{count}  {case}",
            begin.elapsed().as_secs_f64(),
            number + 1
        );
        wanted.check(case);
    }
}
