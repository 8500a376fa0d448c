//! The memory of a step, without computing it.

use phalanx_parallel::mesh::Axis;
use phalanx_tensor::Category;

use crate::Result;
use crate::run::Run;

impl Run {
    /// Runs two steps on a meta device, where there are no elements (the first makes gradients, the second meets them), and tells
    /// what the ledger counted at peak and after the second's backward, and what a step sends. Of several ranks it is the first, which
    /// stands for all: their shares differ by less than a block of 64 elements where they are cut. How long a pipeline's sends wait for
    /// their receivers is a matter of time; what is told is the most, as if receivers came as late as the schedule lets them.
    ///
    /// # Errors
    /// What goes wrong in a step.
    pub fn memory_report(&mut self) -> Result<String> {
        let mut loader = self.loader(self.place().device, 0)?;
        let ledger = self.place().device.ledger()?;
        // Building the model, all of it, is not part of a step.
        ledger.reset_peak();
        let mut sent = 0;
        for _ in 0..2 {
            let micros = loader.next_step()?;
            sent = self.means.share.traffic().bytes;
            self.step(&micros)?;
        }
        sent = self.means.share.traffic().bytes - sent;
        let place = self.place();
        let of = if place.size() > 1 { ", for each rank" } else { "" };
        let mut report = match place.groups.mesh().size(Axis::Pp) {
            1 => format!("{} parameters; ", self.parameters()),
            n => format!(
                "pipeline rank {} of {n}, if all that it sends waits as long as it can; ",
                place.groups.at().pp
            ),
        };
        report += &format!("peak bytes of a training step{of}:\n");
        let rows = || {
            let of = |category: Category| (category.name(), ledger.category(category));
            Category::ALL.map(of).into_iter().chain([("in all", ledger.total())])
        };
        rows().for_each(|(name, usage)| report += &format!("  {name:<16} {:>15}\n", usage.peak));
        report += "after backward:\n";
        rows().for_each(|(name, usage)| report += &format!("  {name:<16} {:>15}\n", usage.now));
        if place.size() > 1 {
            report += &format!("sent in a step:    {sent:>15}\n");
        }
        Ok(report)
    }
}
