//! A timeline as text.

use super::{Span, Timeline};

impl Timeline {
    /// A line for each rank, the makespan being `columns` characters wide: each computation is its name, as far as there is room,
    /// and dots to its end.
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

/// As much of a computation's name as there is room for: `2F3`, `F3`, `F` or nothing.
pub(super) fn label(span: &Span, width: usize) -> String {
    let action = span.action;
    let names =
        [action.to_string(), format!("{}{}", action.kind, action.micro_batch), action.kind.to_string()];
    names.into_iter().find(|name| name.len() <= width).unwrap_or_default()
}
