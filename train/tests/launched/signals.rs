//! Signals to ranks: SIGUSR1 changes nothing, SIGTERM ends a run with all that it has begun.

use super::*;

#[test]
fn sigusr1_dumps_every_rank_of_a_healthy_run_and_changes_nothing() {
    let folder = Folder::new("usr1");
    let losses = ["plain", "told"].map(|name| {
        let (out, port) = (folder.0.join(name), free_port());
        // A run that is told has no end of its own.
        let steps = if name == "told" { 100_000_000 } else { 120 };
        let flags = format!("--dp 2 --steps {steps} --out {}", out.display());
        let children = [0, 1].map(|number| rank(&flags[..]).start(number, 2, port));
        let end = Instant::now() + Duration::from_secs(20);
        while numbers_in(&out.join("metrics.jsonl"), "loss").is_empty() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let send = |signal: &str| {
            for child in &children {
                let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
                assert!(sent.success());
            }
        };
        if name == "told" {
            send("-USR1");
            let dumps = [0, 1].map(|rank| out.join(format!("flight/rank-{rank}.jsonl")));
            while !dumps.iter().all(|dump| dump.exists()) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
            send("-TERM");
        }
        assert_eq!(children.map(ended), ["well"; 2]);
        assert_eq!(out.join("flight").exists(), name == "told");
        let losses = numbers_in(&out.join("metrics.jsonl"), "loss");
        losses.into_iter().map(|(_, loss)| loss.to_bits()).collect::<Vec<_>>()
    });
    assert_eq!(losses[0].len(), 120);
    let common = losses[1].len().min(120);
    assert!(common > 0 && losses[0][..common] == losses[1][..common]);
    let told = phalanx_parallel::flight::explain(&folder.0.join("told/flight")).unwrap();
    assert!(told.contains("2 of 2 ranks have dumps\n  ranks 0, 1: SIGUSR1\n"), "{told}");
}

#[test]
fn a_signal_after_the_last_step_lets_the_run_end_and_says_so() {
    let mut child = rank("").with("AT_END", "").start(0, 1, free_port());
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map_while(std::io::Result::ok);
    assert!(said.any(|line| line == "at the end"));
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert!(said.any(|line| line == "ended well"));
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("the last step is done; ending when all") && !told.contains("saving"), "{told}");
}
