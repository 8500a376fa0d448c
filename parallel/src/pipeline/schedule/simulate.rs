//! [`simulate`]: when each rank would compute what, given [`Costs`]; a [`Timeline`] as numbers, text and SVG.

use std::collections::HashMap;
use std::fmt::Write;

use super::{Action, ActionKind, Error, Result, Schedule, Transfer, verify};

/// The times at which each rank computes the actions of a schedule.
///
/// A rank begins a computation when the one before has ended and its input has arrived. A transfer begins as soon as its tensor
/// is computed, takes the time of its boundary, and delays neither rank nor other transfers. So the result is the same whether
/// or not the schedule has [transfers](super::with_transfers). Updates take no time.
///
/// # Errors
/// If the schedule is wrong, or the costs do not fit it.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline> {
    verify(schedule, usize::MAX)?;
    costs.check(schedule)?;
    let ranks = schedule.ranks.len();
    let computations = |actions: &Vec<Action>| actions.iter().copied().filter(|a| computes(a.kind)).collect();
    let lists: Vec<Vec<Action>> = schedule.ranks.iter().map(computations).collect();
    let mut spans: Vec<Vec<Span>> = vec![Vec::new(); ranks];
    let mut arrivals: HashMap<Transfer, f64> = HashMap::new();
    // All lists come to their ends, since a verified schedule has no deadlock.
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..ranks {
            while let Some(&action) = lists[rank].get(spans[rank].len()) {
                let input = schedule.input(action).map(|input| arrivals.get(&input).copied());
                let Some(ready) = input.unwrap_or(Some(0.0)) else { break };
                let begin = spans[rank].last().map_or(0.0, |span| span.end).max(ready);
                let end = begin + costs.of(action);
                if let Some(output) = schedule.output(action) {
                    let time = if schedule.travels(output) { costs.between(output) } else { 0.0 };
                    arrivals.insert(output, end + time);
                }
                spans[rank].push(Span { action, begin, end });
                moved = true;
            }
        }
    }
    let peaks = lists.iter().map(|actions| peak(actions, costs)).collect();
    Ok(Timeline { ranks: spans, peak_activations: peaks })
}

fn computes(kind: ActionKind) -> bool {
    !kind.is_transfer() && kind != ActionKind::Update
}

/// The most activations that a rank holds at once. It holds one from the beginning of an `F` to the end of its `B` or `W`.
fn peak(actions: &[Action], costs: &Costs) -> f64 {
    let (mut now, mut most) = (0.0_f64, 0.0_f64);
    for action in actions {
        match action.kind {
            ActionKind::Forward => now += costs.activation[action.stage],
            ActionKind::Backward | ActionKind::Weight => now -= costs.activation[action.stage],
            _ => {}
        }
        most = most.max(now);
    }
    most
}

/// The time of each stage's computations and the size of its activations, in any units. Every list has an entry for each stage,
/// and `transfer` has one for each boundary between stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// The time of `F`.
    pub forward: Vec<f64>,
    /// The time of `B`.
    pub backward: Vec<f64>,
    /// The time of `I`.
    pub input: Vec<f64>,
    /// The time of `W`.
    pub weight: Vec<f64>,
    /// The time of a transfer between stage `s` and the next, in entry `s`, if they are on different ranks.
    pub transfer: Vec<f64>,
    /// The size of the activation that is held from `F` until `B` or `W` has ended.
    pub activation: Vec<f64>,
}

impl Costs {
    /// Costs if every rank has an equal part of the model, and its stages equal parts of that. `forward`, `input` and `weight` are
    /// a rank's times for a micro-batch. `B` takes as long as `I` and `W` together. A rank's activation of a micro-batch is 1.
    pub fn even(schedule: &Schedule, forward: f64, input: f64, weight: f64, transfer: f64) -> Costs {
        let of_rank = |rank| schedule.stages_of(rank).count() as f64;
        let part: Vec<f64> = schedule.placement.iter().map(|&rank| 1.0 / of_rank(rank)).collect();
        let each = |time: f64| part.iter().map(|part| time * part).collect();
        Costs {
            forward: each(forward),
            backward: each(input + weight),
            input: each(input),
            weight: each(weight),
            transfer: vec![transfer; part.len().saturating_sub(1)],
            activation: part,
        }
    }

    /// Refuses lists of the wrong length, and costs that are negative or not finite.
    fn check(&self, schedule: &Schedule) -> Result<()> {
        let stages = schedule.stages();
        let lists = [
            ("forward", &self.forward, stages),
            ("backward", &self.backward, stages),
            ("input", &self.input, stages),
            ("weight", &self.weight, stages),
            ("transfer", &self.transfer, stages.saturating_sub(1)),
            ("activation", &self.activation, stages),
        ];
        let invalid = |got, wanted| Err(Error::Invalid { op: "simulate", got, wanted });
        for (name, list, count) in lists {
            if list.len() != count {
                let got = format!("{} {name} costs for {stages} stages", list.len());
                return invalid(got, "one for each stage, of transfers for each boundary");
            }
            if let Some(cost) = list.iter().find(|cost| !(cost.is_finite() && **cost >= 0.0)) {
                return invalid(format!("{name} cost {cost}"), "a finite number from 0 up");
            }
        }
        Ok(())
    }

    /// The time of a computation; 0 for sends and receives.
    fn of(&self, action: Action) -> f64 {
        match action.kind {
            ActionKind::Forward => self.forward[action.stage],
            ActionKind::Backward => self.backward[action.stage],
            ActionKind::Input => self.input[action.stage],
            ActionKind::Weight => self.weight[action.stage],
            _ => 0.0,
        }
    }

    /// The time of a transfer.
    fn between(&self, transfer: Transfer) -> f64 {
        self.transfer[transfer.from.min(transfer.to)]
    }
}

/// A computation and its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The action.
    pub action: Action,
    /// When it began, in the unit of the costs.
    pub begin: f64,
    /// When it ended.
    pub end: f64,
}

/// When every rank computed which action.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The computations of each rank, in order.
    pub ranks: Vec<Vec<Span>>,
    /// The most activations that each rank holds at once, in the unit of the costs.
    pub peak_activations: Vec<f64>,
}

impl Timeline {
    /// The time from the beginning to the last end of any rank.
    pub fn makespan(&self) -> f64 {
        self.ranks.iter().flatten().fold(0.0, |last, span| last.max(span.end))
    }

    /// The time that a rank computes.
    pub fn work(&self, rank: usize) -> f64 {
        self.ranks[rank].iter().map(|span| span.end - span.begin).sum()
    }

    /// The time from a rank's first beginning to its last end.
    pub fn span(&self, rank: usize) -> f64 {
        let spans = &self.ranks[rank];
        spans.first().zip(spans.last()).map_or(0.0, |(first, last)| last.end - first.begin)
    }

    /// The share of a step in which ranks are idle, if every rank's step lasts from the beginning to the last end of any rank: the
    /// optimizer waits for all stages.
    pub fn bubble_by_makespan(&self) -> f64 {
        self.bubble(self.makespan())
    }

    /// The share of a step in which ranks are idle, if a rank's step lasts from its own first beginning to its own last end, and
    /// the longest counts: each stage's optimizer waits for that stage alone, and the next step follows at once.
    pub fn bubble_by_span(&self) -> f64 {
        self.bubble((0..self.ranks.len()).map(|rank| self.span(rank)).fold(0.0, f64::max))
    }

    fn bubble(&self, step: f64) -> f64 {
        let work: f64 = (0..self.ranks.len()).map(|rank| self.work(rank)).sum();
        if step > 0.0 { 1.0 - work / (step * self.ranks.len() as f64) } else { 0.0 }
    }

    /// The most activations that any rank holds at once.
    pub fn peak_activation(&self) -> f64 {
        self.peak_activations.iter().fold(0.0, |most, &peak| most.max(peak))
    }
}

impl Timeline {
    /// A line of text for each rank. The makespan is `columns` characters wide. Each computation is shown by its name, as far as
    /// there is room, and dots up to its end.
    ///
    /// ```
    /// use phalanx_parallel::pipeline::schedule::{Costs, one_f_one_b, simulate};
    ///
    /// let schedule = one_f_one_b(2, 3)?;
    /// let timeline = simulate(&schedule, &Costs::even(&schedule, 1.0, 1.0, 1.0, 0.0))?;
    /// assert_eq!(
    ///     timeline.to_text(36),
    ///     "rank 0 |0F00F1      0B0...0F20B1...   0B2...\n\
    ///      rank 1 |   1F01B0...1F11B1...1F21B2...\n"
    /// );
    /// # Ok::<(), phalanx_parallel::pipeline::schedule::Error>(())
    /// ```
    pub fn to_text(&self, columns: usize) -> String {
        let scale = columns as f64 / self.makespan().max(f64::MIN_POSITIVE);
        let digits = self.ranks.len().saturating_sub(1).to_string().len();
        let line = |(rank, spans): (usize, &Vec<Span>)| {
            let mut cells = String::new();
            for span in spans {
                let (begin, end) =
                    ((span.begin * scale).round() as usize, (span.end * scale).round() as usize);
                let width = end.saturating_sub(begin);
                let name = label(span, width);
                cells += &" ".repeat(begin.saturating_sub(cells.len()));
                cells += &name;
                cells += &".".repeat(width - name.len());
            }
            format!("rank {rank:digits$} |{cells}\n")
        };
        self.ranks.iter().enumerate().map(line).collect()
    }
}

/// The longest name of a computation that fits: `2F3`, `F3`, `F` or nothing.
fn label(span: &Span, width: usize) -> String {
    let action = span.action;
    let names =
        [action.to_string(), format!("{}{}", action.kind, action.micro_batch), action.kind.to_string()];
    names.into_iter().find(|name| name.len() <= width).unwrap_or_default()
}

/// Pixels: the picture's width, a rank's height, the room for its name, and a character's width.
const WIDTH: f64 = 1200.0;
const LANE: f64 = 26.0;
const NAME: f64 = 60.0;
const LETTER: f64 = 7.0;

impl Timeline {
    /// An SVG with a lane for each rank, and the bubbles, the makespan and the activations beneath.
    pub fn to_svg(&self) -> String {
        let scale = (WIDTH - NAME) / self.makespan().max(f64::MIN_POSITIVE);
        let height = LANE * (self.ranks.len() + 1) as f64;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" \
             font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        for (rank, spans) in self.ranks.iter().enumerate() {
            let top = LANE * rank as f64;
            let _ = writeln!(svg, "<text x=\"4\" y=\"{:.1}\">rank {rank}</text>", top + 0.65 * LANE);
            spans.iter().for_each(|span| draw(&mut svg, span, top, scale));
        }
        let _ = writeln!(
            svg,
            "<text x=\"4\" y=\"{:.1}\">makespan {:.4}, bubble {:.4} of the makespan, {:.4} of the longest span, activations {:.4}</text>\n</svg>",
            height - 0.35 * LANE,
            self.makespan(),
            self.bubble_by_makespan(),
            self.bubble_by_span(),
            self.peak_activation(),
        );
        svg
    }
}

/// One computation: a box, its name if there is room, and a tooltip with name and times. Writing to a string does not fail.
fn draw(svg: &mut String, span: &Span, top: f64, scale: f64) {
    let Span { action, begin, end } = span;
    let fill = match action.kind {
        ActionKind::Forward => "#8ecae6",
        ActionKind::Input => "#ffd166",
        ActionKind::Weight => "#95d5b2",
        _ => "#f4a261",
    };
    let (left, width) = (NAME + begin * scale, (end - begin) * scale);
    let _ = write!(
        svg,
        "<g><title>{action} {begin:.4} to {end:.4}</title><rect x=\"{left:.2}\" y=\"{:.1}\" width=\"{width:.2}\" height=\"{:.1}\" \
         fill=\"{fill}\" stroke=\"white\"/>",
        top + 2.0,
        LANE - 4.0,
    );
    let name = label(span, (width / LETTER) as usize);
    let (x, y) = (left + 2.0, top + 0.65 * LANE);
    let _ = writeln!(svg, "<text x=\"{x:.2}\" y=\"{y:.1}\" pointer-events=\"none\">{name}</text></g>");
}
