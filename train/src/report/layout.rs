//! The ranks as a grid of data, tensor and pipeline parallelism, with the contents of each.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::format::{bytes, count, escape};

/// What each rank holds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Layout {
    /// Replicas of the model: rows of the grid.
    pub data: usize,
    /// Ranks of tensor parallelism: within a field of the grid.
    pub tensor: usize,
    /// Ranks of the pipeline: columns of the grid.
    pub pipeline: usize,
    /// ZeRO's stage: replicas shard 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
    pub zero_stage: u8,
    /// The pipeline's schedule, such as `1f1b`; may be empty.
    pub schedule: String,
    /// What each rank holds.
    pub ranks: Vec<RankStorage>,
}

/// What one rank holds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RankStorage {
    /// The rank's number.
    pub rank: usize,
    /// Its replica, from 0.
    pub data: usize,
    /// Its rank in tensor parallelism, from 0.
    pub tensor: usize,
    /// Its rank in the pipeline, from 0.
    pub pipeline: usize,
    /// Its stages of the pipeline, from 0. Ranks with the same stages have the same colour.
    pub stages: Vec<usize>,
    /// These stages' part of the model, such as `embedding, blocks 0-5`.
    pub holds: String,
    /// Elements of parameters that it keeps between steps.
    pub parameters: u64,
    /// Bytes of parameters that it keeps; 0 if unknown, as in the next two fields.
    pub parameters_bytes: u64,
    /// Bytes of gradients between two steps.
    pub gradients_bytes: u64,
    /// Bytes of the optimizer's state.
    pub optimizer_bytes: u64,
    /// Its device, such as `cpu:0`; may be empty.
    pub device: String,
}

/// The most replicas that are all drawn.
const REPLICAS: usize = 6;
/// The most ranks that are drawn with their contents; of more, only the numbers are drawn.
const RANKS: usize = 32;

impl Layout {
    /// A caption and the grid. Percentages are of `parameters`, if that is known.
    pub(super) fn html(&self, parameters: u64) -> String {
        let replicas: Vec<usize> = (0..self.data.max(1)).filter(|&replica| self.is_drawn(replica)).collect();
        let dense = replicas.len() * self.tensor.max(1) * self.pipeline.max(1) > RANKS;
        let mut html = format!("<p class=\"about\">{}</p>\n", escape(&self.caption()));
        let _ = writeln!(
            html,
            "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"Grid of ranks\"><div class=\"ranks{}\" \
             style=\"--columns: {}\">",
            if dense { " dense" } else { "" },
            self.pipeline.max(1)
        );
        self.head(&mut html, parameters, dense);
        for (at, &replica) in replicas.iter().enumerate() {
            if at > 0 && replicas[at - 1] + 1 < replica {
                let [from, to] = [replicas[at - 1] + 1, replica - 1];
                let _ =
                    writeln!(html, "<p class=\"alike\">Replicas {from} to {to} have the same stages.</p>");
            }
            let _ = write!(html, "<span class=\"axis\">data {replica}</span>");
            for pipeline_rank in 0..self.pipeline.max(1) {
                html.push_str("<div class=\"place\">");
                let here = |rank: &&RankStorage| rank.data == replica && rank.pipeline == pipeline_rank;
                self.ranks.iter().filter(here).for_each(|rank| self.rank(&mut html, rank, parameters, dense));
                html.push_str("</div>\n");
            }
        }
        html.push_str("</div></div>\n");
        html
    }

    /// The replicas that are drawn: all, or the first ones and the last.
    fn is_drawn(&self, replica: usize) -> bool {
        self.data <= REPLICAS || replica < REPLICAS - 2 || replica + 1 == self.data
    }

    /// The columns' heads. In a dense grid they also say what the ranks below hold.
    fn head(&self, html: &mut String, parameters: u64, dense: bool) {
        if self.pipeline <= 1 && !dense {
            return;
        }
        html.push_str("<span></span>");
        for pipeline_rank in 0..self.pipeline.max(1) {
            let first = self.ranks.iter().find(|rank| rank.pipeline == pipeline_rank).filter(|_| dense);
            let facts = first.map(|rank| self.facts(rank, parameters).join(", ")).unwrap_or_default();
            let name =
                if self.pipeline > 1 { format!("pipeline {pipeline_rank}") } else { "all ranks".to_owned() };
            let _ = write!(html, "<span class=\"axis head\"><b>{name}</b> {}</span>", escape(&facts));
        }
    }

    fn rank(&self, html: &mut String, rank: &RankStorage, parameters: u64, dense: bool) {
        // The first replica has every rank of the pipeline, and so every colour.
        let first_replica = self.ranks.iter().filter(|r| r.data == 0 && r.tensor == 0);
        let colour = first_replica.take_while(|r| r.stages != rank.stages).count() % 8 + 1;
        if dense {
            let facts = escape(&[self.labels(rank), self.facts(rank, parameters)].concat().join(", "));
            let _ =
                write!(html, "<div class=\"rank c{colour}\" title=\"{facts}\"><b>{}</b></div>", rank.rank);
            return;
        }
        let labels = escape(&self.labels(rank).join(", "));
        let _ =
            write!(html, "<div class=\"rank c{colour}\"><b>rank {}</b> <small>{labels}</small>", rank.rank);
        for fact in self.facts(rank, parameters) {
            let _ = write!(html, "<span>{}</span>", escape(&fact));
        }
        if parameters > 0 && rank.parameters > 0 {
            let share = 100.0 * rank.parameters as f64 / parameters as f64;
            let _ = write!(html, "<i class=\"share\" style=\"--share: {share:.1}%\"></i>");
        }
        html.push_str("</div>");
    }

    /// What tells a rank from the others in its field of the grid.
    fn labels(&self, rank: &RankStorage) -> Vec<String> {
        let tensor = if self.tensor > 1 { format!("tensor {}", rank.tensor) } else { String::new() };
        [tensor, rank.device.clone()].into_iter().filter(|fact| !fact.is_empty()).collect()
    }

    /// The text that all ranks of a column share.
    fn facts(&self, rank: &RankStorage, parameters: u64) -> Vec<String> {
        let mut facts = Vec::new();
        if self.pipeline > 1 && !rank.stages.is_empty() {
            let stages: Vec<String> = rank.stages.iter().map(usize::to_string).collect();
            facts.push(format!("stage{} {}", if stages.len() > 1 { "s" } else { "" }, stages.join(", ")));
        }
        facts.push(rank.holds.clone());
        if rank.parameters > 0 && parameters > 0 {
            facts.push(format!("{:.1} % of parameters", 100.0 * rank.parameters as f64 / parameters as f64));
        } else if rank.parameters > 0 {
            facts.push(format!("{} parameters", count(rank.parameters)));
        }
        let sizes = [
            (rank.parameters_bytes, "parameters"),
            (rank.gradients_bytes, "gradients"),
            (rank.optimizer_bytes, "optimizer state"),
        ];
        let known = sizes.into_iter().filter(|(size, _)| *size > 0);
        facts.extend(known.map(|(size, of)| format!("{} of {of}", bytes(size))));
        facts.retain(|fact| !fact.is_empty());
        facts
    }

    fn caption(&self) -> String {
        let mut parts = Vec::new();
        for (size, name) in [
            (self.data, "replicas with their own data"),
            (self.tensor, "ranks that share each layer"),
            (self.pipeline, "places in the pipeline"),
        ] {
            if size > 1 {
                parts.push(format!("{size} {name}"));
            }
        }
        let mut text = if parts.is_empty() { "One rank".to_owned() } else { parts.join(" × ") };
        if !self.schedule.is_empty() && self.pipeline > 1 {
            let _ = write!(text, " (schedule {})", self.schedule);
        }
        text.push_str(match self.zero_stage {
            0 => ".",
            1 => ". ZeRO stage 1: replicas share the optimizer state.",
            2 => ". ZeRO stage 2: replicas share the optimizer state and the gradients.",
            _ => ". ZeRO stage 3: replicas share the optimizer state, the gradients and the parameters.",
        });
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(data: usize, pipeline: usize) -> Layout {
        let at = |rank| (rank / pipeline, rank % pipeline);
        let holds = |rank| RankStorage {
            rank,
            data: at(rank).0,
            pipeline: at(rank).1,
            stages: vec![at(rank).1],
            holds: "blocks <0>".to_owned(),
            parameters: 25,
            ..RankStorage::default()
        };
        let ranks = (0..data * pipeline).map(holds).collect();
        Layout { data, tensor: 1, pipeline, ranks, ..Layout::default() }
    }

    #[test]
    fn the_same_stage_has_the_same_colour() {
        let html = layout(2, 2).html(100);
        assert_eq!(html.matches("rank c1").count(), 2);
        assert_eq!(html.matches("rank c2").count(), 2);
        assert!(html.contains("25.0 % of parameters") && html.contains("blocks &lt;0&gt;"), "{html}");
    }

    #[test]
    fn a_thousand_replicas_are_not_all_drawn() {
        let html = layout(1000, 2).html(0);
        assert_eq!(html.matches("class=\"rank ").count(), 10);
        assert!(html.contains("Replicas 4 to 998 have the same stages."), "{html}");
    }

    #[test]
    fn the_caption_says_what_zero_cuts() {
        let caption = Layout { zero_stage: 2, schedule: "1f1b".into(), ..layout(2, 2) }.caption();
        assert_eq!(
            caption,
            "2 replicas with their own data × 2 places in the pipeline (schedule 1f1b). ZeRO stage 2: replicas share the \
             optimizer state and the gradients."
        );
    }
}
