//! Every layout trains as one device does: a sample of them, and all.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::time::Instant;

use phalanx_parallel::hybrid::Layout;

use crate::case::{Case, all};
use crate::draws::Draws;
use crate::outcome::{Alike, STEPS, alone, assert_same, together};
use crate::run::CLIP;

/// One device's runs, which many layouts share.
#[derive(Default)]
struct Wanted(HashMap<String, Alike>);

impl Wanted {
    fn of(&mut self, case: &Case) -> &Alike {
        let key = format!("{:?} {} {} {}", case.model, case.dtype, case.layout.dp, case.layout.micro_batches);
        let alike = self.0.entry(key).or_insert_with(|| alone(case, 0..STEPS));
        let clipped = alike.norms.iter().filter(|&&norm| norm > CLIP).count();
        assert!(clipped * 2 > alike.norms.len(), "{case}: clipping has to act: {:?}", alike.norms);
        alike
    }

    fn check(&mut self, case: &Case) {
        assert_same(case, &together(case, 0..STEPS), self.of(case));
    }
}

/// Few cases in which every two values of two axes meet that meet in any: of some drawn ones the one that has the most new
/// pairs for its cost, and so on.
fn sample(all: &[Case]) -> Vec<&Case> {
    let mut words: BTreeMap<String, usize> = BTreeMap::new();
    let mut number = |word: &str| {
        let next = words.len();
        *words.entry(word.into()).or_insert(next)
    };
    let named: Vec<Vec<usize>> =
        all.iter().map(|case| case.to_string().split(' ').map(&mut number).collect()).collect();
    let pairs = |words: &[usize]| -> Vec<(usize, usize)> {
        words.iter().enumerate().flat_map(|(i, &b)| words[..i].iter().map(move |&a| (a, b))).collect()
    };
    let mut open: BTreeSet<(usize, usize)> = named.iter().flat_map(|words| pairs(words)).collect();
    let (mut draws, mut chosen) = (Draws(1), Vec::new());
    while let Some((a, b)) = open.first() {
        let has = |i: &usize| named[*i].contains(a) && named[*i].contains(b);
        let candidates: Vec<usize> = (0..all.len()).filter(has).collect();
        let new = |i: &usize| pairs(&named[*i]).iter().filter(|pair| open.contains(pair)).count();
        let worth = |i: &usize| 1000 * new(i) / cost(&all[*i]);
        let drawn = (0..100).map(|_| candidates[draws.below(candidates.len())]);
        let best = drawn.max_by_key(worth).unwrap();
        pairs(&named[best]).iter().for_each(|pair| _ = open.remove(pair));
        chosen.push(&all[best]);
    }
    chosen
}

/// How long a case takes, roughly: ranks that cut layers wait for each other most.
fn cost(case: &Case) -> usize {
    let Layout { dp, tp, micro_batches, .. } = case.layout;
    20 + dp * tp * tp * micro_batches
}

#[test]
fn a_sample_in_which_all_pairs_of_settings_meet_trains_as_one_device_does() {
    let all = all();
    // Without optimisation there is no time for all of them.
    let every = if cfg!(debug_assertions) { 8 } else { 1 };
    let mut wanted = Wanted::default();
    sample(&all).into_iter().step_by(every).for_each(|case| wanted.check(case));
}

/// `PHALANX_LAYOUTS`: how many (all), `PHALANX_LAYOUTS_SEED`: which (0), `PHALANX_LAYOUTS_ONLY`: words that their names have.
#[test]
#[ignore = "takes a day"]
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
    let (mut wanted, begin) = (Wanted::default(), Instant::now());
    for (number, case) in cases.iter().enumerate() {
        // Written directly: the test harness shows nothing that a test prints and passes.
        let at = format!("{:4.0} s  {}/{count}", begin.elapsed().as_secs_f64(), number + 1);
        let _ = writeln!(std::io::stderr(), "{at}  {case}");
        wanted.check(case);
    }
}
