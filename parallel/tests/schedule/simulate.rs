//! The simulator, against published and hand-made timelines.

use phalanx_parallel::pipeline::schedule::{
    Costs, Error, Schedule, Timeline, by_name, gpipe, one_f_one_b, simulate, with_transfers, zb_h1,
};

fn even(name: &str, ranks: usize, micro_batches: usize, [f, i, w, transfer]: [f64; 4]) -> Timeline {
    let schedule = by_name(name, ranks, 2, micro_batches).unwrap();
    simulate(&schedule, &Costs::even(&schedule, f, i, w, transfer)).unwrap()
}

fn digits(number: f64) -> String {
    format!("{number:.4}")
}

/// Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241): table 5's bubbles of 1F1B, ZB-H1 and ZB-H2 at table 9's times.
#[test]
fn the_zero_bubble_papers_rates_come_out_to_four_decimals() {
    let rows = [
        (8, 24, [18.522, 18.086, 9.337, 0.601], ["0.2431", "0.1585", "0.1083"]),
        (8, 32, [18.513, 18.086, 9.331, 0.626], ["0.1985", "0.1242", "0.0837"]),
        (8, 64, [18.546, 18.097, 9.321, 0.762], ["0.1240", "0.0674", "0.0444"]),
        (16, 48, [11.347, 11.248, 8.132, 0.377], ["0.2552", "0.1397", "0.0672"]),
    ];
    for (ranks, micro_batches, times, wanted) in rows {
        let run = |name| even(name, ranks, micro_batches, times);
        let got = [
            digits(run("1f1b").bubble_by_makespan()),
            digits(run("zb-h1").bubble_by_makespan()),
            // The paper's optimizer does not wait for all stages with ZB-H2.
            digits(run("zb-h2").bubble_by_span()),
        ];
        assert_eq!(got, wanted, "{ranks} ranks, {micro_batches} micro-batches");
    }
}

#[test]
fn bubbles_and_activations_are_those_of_the_reference_generators() {
    let rows = [
        ("gpipe", "0.2258", "0.2258", 24.0),
        ("1f1b", "0.2258", "0.2258", 8.0),
        ("interleaved", "0.1273", "0.1273", 11.5),
        ("zb-h1", "0.0886", "0.0886", 8.0),
        ("zb-h2", "0.0886", "0.0000", 15.0),
        ("zb-v", "0.0464", "0.0000", 8.0),
    ];
    for (name, makespan, span, activations) in rows {
        let timeline = even(name, 8, 24, [1.0, 1.0, 1.0, 0.0]);
        assert_eq!(digits(timeline.bubble_by_makespan()), makespan, "{name}");
        assert_eq!(digits(timeline.bubble_by_span()), span, "{name}");
        assert_eq!(timeline.peak_activation(), activations, "{name}");
    }
}

#[test]
fn gpipes_bubble_is_its_papers() {
    for (n, m) in [(2, 1), (2, 4), (3, 5), (4, 32), (8, 3)] {
        let bubble = even("gpipe", n, m, [1.0, 1.0, 1.0, 0.0]).bubble_by_makespan();
        assert!((bubble - (n - 1) as f64 / (m + n - 1) as f64).abs() < 1e-12, "{n} ranks, {m} micro-batches");
    }
}

#[test]
fn transfers_are_waited_for_by_those_who_need_them() {
    let schedule = gpipe(2, 2).unwrap();
    let costs = Costs::even(&schedule, 2.0, 3.0, 1.0, 0.5);
    let timeline = simulate(&schedule, &costs).unwrap();
    let spans =
        |rank: usize| -> Vec<(f64, f64)> { timeline.ranks[rank].iter().map(|s| (s.begin, s.end)).collect() };
    assert_eq!(spans(0), [(0.0, 2.0), (2.0, 4.0), (11.0, 15.0), (15.0, 19.0)]);
    assert_eq!(spans(1), [(2.5, 4.5), (4.5, 6.5), (6.5, 10.5), (10.5, 14.5)]);
    assert_eq!((timeline.makespan(), timeline.span(1), timeline.work(0)), (19.0, 12.0, 12.0));
    assert_eq!(timeline.bubble_by_makespan(), 1.0 - 12.0 / 19.0);
    assert_eq!(timeline.bubble_by_span(), 1.0 - 12.0 / 19.0);
    let lowered = with_transfers(&schedule).unwrap();
    assert_eq!(simulate(&lowered, &costs).unwrap(), timeline);
}

#[test]
fn stages_have_times_and_activations_of_their_own() {
    let schedule: Schedule = "0F0 1F0 1B0 0I0 0W0".parse().unwrap();
    let costs = Costs {
        forward: vec![1.0, 2.0],
        backward: vec![9.0, 4.0],
        input: vec![8.0, 16.0],
        weight: vec![32.0, 64.0],
        transfer: vec![100.0],
        activation: vec![3.0, 5.0],
    };
    let timeline = simulate(&schedule, &costs).unwrap();
    assert_eq!(timeline.makespan(), 1.0 + 2.0 + 4.0 + 8.0 + 32.0, "stages of one rank need no transfer");
    assert_eq!(timeline.peak_activations, [8.0]);
}

#[test]
fn costs_that_do_not_fit_are_refused() {
    let schedule = one_f_one_b(2, 2).unwrap();
    let refused = |change: fn(&mut Costs)| {
        let mut costs = Costs::even(&schedule, 1.0, 1.0, 1.0, 0.0);
        change(&mut costs);
        simulate(&schedule, &costs).unwrap_err().to_string()
    };
    let wanted = "wanted one for each stage, of transfers for each boundary";
    assert_eq!(
        refused(|c| c.weight.push(1.0)),
        format!("simulate: got 3 weight costs for 2 stages, {wanted}")
    );
    assert_eq!(
        refused(|c| c.transfer.clear()),
        format!("simulate: got 0 transfer costs for 2 stages, {wanted}")
    );
    assert_eq!(
        refused(|c| c.input[1] = -1.0),
        "simulate: got input cost -1, wanted a finite number from 0 up"
    );
    assert!(matches!(
        simulate(&"0F0".parse().unwrap(), &Costs::even(&schedule, 1.0, 1.0, 1.0, 0.0)),
        Err(Error::Missing { .. })
    ));
}

#[test]
fn a_timeline_is_drawn_as_text() {
    let schedule = zb_h1(3, 4).unwrap();
    let timeline = simulate(&schedule, &Costs::even(&schedule, 1.0, 1.0, 1.0, 0.0)).unwrap();
    assert_eq!(
        timeline.to_text(42),
        "rank 0 |0F00F10F2      0I00W00F30I10W10I20W20I30W3\n\
         rank 1 |   1F01F1   1I01F21I11W01F31I21W11I31W21W3\n\
         rank 2 |      2F02I02F12I12F22I22W02F32I32W12W22W3\n"
    );
    assert_eq!(timeline.to_text(14).lines().next().unwrap(), "rank 0 |FFF  IWFIWIWIW");
}

#[test]
fn a_timeline_is_drawn_as_svg() {
    let schedule = by_name("zb-v", 2, 2, 3).unwrap();
    let svg = simulate(&schedule, &Costs::even(&schedule, 1.0, 1.0, 1.0, 0.1)).unwrap().to_svg();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("<g>").count(), schedule.ranks.iter().map(Vec::len).sum::<usize>());
    assert_eq!(svg.matches("<g>").count(), svg.matches("</g>").count());
    assert!(svg.contains("<title>3F0 ") && !svg.contains("NaN") && !svg.contains("inf"));
}
