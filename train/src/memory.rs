//! [`Run::memory_report`]: the memory that a step needs, found on a meta device.

use phalanx_parallel::mesh::Axis;
use phalanx_tensor::Category;

use crate::Result;
use crate::run::Run;

impl Run {
    /// Runs two steps on a meta device, which has no elements, and returns a table of the bytes that the ledger counted: at the peak, and after
    /// the second backward pass. The second step is the one that counts, because the first allocates the gradients. With several ranks the table
    /// is that of the first rank. The others need as much, up to a block of 64 elements for each parameter that is cut. In a pipeline, a tensor
    /// that is sent counts until its receiver takes it; the table assumes that receivers come as late as the schedule allows.
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
