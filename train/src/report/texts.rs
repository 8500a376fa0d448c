//! The parts of the page that are text: samples, settings, the machine.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::format::{bytes, escape, grouped, rate};

/// A sample of the model's text.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// The number of steps done before it.
    pub step: u64,
    /// The prompt; may be empty.
    pub prompt: String,
    /// The continuation.
    pub text: String,
}

/// A setting and its value.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Setting {
    /// Its name, such as `--lr`.
    pub key: String,
    /// Its value.
    pub value: String,
    /// Whether it was given; the page emphasizes it. Otherwise it is a default.
    pub given: bool,
}

/// The machine of a run. Fields that are empty or 0 are left out of the page.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// The number of cores that the run had.
    pub cores: usize,
    /// The kernels' instruction set, such as `AVX-512`.
    pub isa: String,
    /// The machine's memory.
    pub memory_bytes: u64,
    /// The operating system.
    pub os: String,
    /// The GPU's name.
    pub gpu: String,
    /// The program and its version.
    pub version: String,
    /// The commit that it was built from.
    pub commit: String,
    /// The measured peak of floating-point operations per second.
    pub peak_flops_per_s: f64,
    /// The measured peak of bytes per second between memory and a core's registers.
    pub peak_bytes_per_s: f64,
    /// Further facts: name and value.
    pub more: Vec<(String, String)>,
}

/// A list of samples that unfold; the last one is open.
pub(super) fn samples(samples: &[Sample]) -> String {
    let mut html = String::new();
    for (at, sample) in samples.iter().enumerate() {
        let open = if at + 1 == samples.len() { " open" } else { "" };
        let prompt = match sample.prompt.as_str() {
            "" => String::new(),
            prompt => format!("<mark>{}</mark>", escape(prompt)),
        };
        let _ = writeln!(
            html,
            "<details{open}><summary>After step {}</summary><pre class=\"sample\">\n{prompt}{}</pre></details>",
            grouped(sample.step),
            escape(&sample.text)
        );
    }
    html
}

/// Names and values.
pub(super) fn settings(settings: &[Setting]) -> String {
    let given = settings.iter().filter(|s| s.given).count();
    let mut html = String::new();
    if (1..settings.len()).contains(&given) {
        html.push_str("<p class=\"about\">Settings in bold were given; the others have their default.</p>\n");
    }
    html.push_str("<dl class=\"pairs\">\n");
    for Setting { key, value, given } in settings {
        let class = if *given { " class=\"given\"" } else { "" };
        let _ = writeln!(html, "<div{class}><dt>{}</dt><dd>{}</dd></div>", escape(key), escape(value));
    }
    html + "</dl>\n"
}

/// A command that breaks only between words.
pub(super) fn command(command: &str) -> String {
    let words: Vec<String> =
        command.split(' ').map(|word| format!("<span>{}</span>", escape(word))).collect();
    format!("<pre class=\"command\">\n{}</pre>\n", words.join(" "))
}

impl Machine {
    /// The known facts by name.
    fn facts(&self) -> Vec<(&str, String)> {
        let known = |size: u64, text: String| if size > 0 { text } else { String::new() };
        let [flops, speed] = [self.peak_flops_per_s, self.peak_bytes_per_s];
        let mut facts = vec![
            ("Processor", self.cpu.clone()),
            ("Cores", known(self.cores as u64, self.cores.to_string())),
            ("Instruction set", self.isa.clone()),
            ("Memory", known(self.memory_bytes, bytes(self.memory_bytes))),
            ("Peak, measured", known(flops as u64, rate(flops, "FLOP/s"))),
            ("Memory's speed, measured", known(speed as u64, rate(speed, "B/s"))),
            ("GPU", self.gpu.clone()),
            ("Operating system", self.os.clone()),
            ("Program", self.version.clone()),
            ("Commit", self.commit.clone()),
        ];
        facts.extend(self.more.iter().map(|(name, value)| (name.as_str(), value.clone())));
        facts.retain(|(_, value)| !value.is_empty());
        facts
    }

    /// Whether nothing is known.
    pub(super) fn is_empty(&self) -> bool {
        self.facts().is_empty()
    }

    /// Names and values.
    pub(super) fn html(&self) -> String {
        let mut html = "<dl class=\"pairs\">\n".to_owned();
        for (name, value) in self.facts() {
            let _ = writeln!(html, "<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(&value));
        }
        html + "</dl>\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_sample_is_open() {
        let sample = |step| Sample { step, prompt: "fn ".into(), text: "main".into() };
        let html = samples(&[sample(10), sample(20)]);
        assert!(html.contains("<details><summary>After step 10<"), "{html}");
        assert!(html.contains("<details open><summary>After step 20<"), "{html}");
        assert!(html.contains("<mark>fn </mark>main"), "{html}");
    }

    #[test]
    fn unknown_facts_do_not_show() {
        assert!(Machine::default().is_empty());
        let html = Machine { cores: 2, peak_flops_per_s: 1.5e11, ..Machine::default() }.html();
        assert_eq!(html.matches("<dt>").count(), 2);
        assert!(html.contains("<dd>150 GFLOP/s</dd>"), "{html}");
    }
}
