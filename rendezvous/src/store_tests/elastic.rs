//! Runs whose number of ranks changes: some go for good, come late, or are started again.

use super::*;

/// Long enough for the threads of a loaded machine to come one after another.
const LAST_CALL: Duration = Duration::from_secs(2);

/// Waits until the member hears that another one wants to be let in.
fn await_change(member: &mut Member) {
    let end = Instant::now() + LONG;
    while !member.wants_to_change() {
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(1));
    }
}

/// What the members of these places get once all of them have met, of whom each says that it is one of `size`. One that comes when the
/// others have begun without it is let in, as a run does it.
fn meet_some(members: &mut [Member], ranks: &[usize], size: usize) -> Vec<Met> {
    scope(|scope| {
        let some = members.iter_mut().enumerate().filter(|(rank, _)| ranks.contains(rank));
        let meet = |(rank, member): (usize, &'_ mut Member)| loop {
            let met = member.meet((rank, size), LONG).unwrap();
            if met.streams.len() == ranks.len() {
                return met;
            }
            await_change(member);
        };
        let threads: Vec<_> = some.map(|each| scope.spawn(move || meet(each))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn places(met: &[Met]) -> Vec<(u64, usize, usize)> {
    met.iter().map(|met| (met.epoch, met.rank, met.streams.len())).collect()
}

#[test]
fn ranks_go_on_with_fewer_and_let_others_in_again() {
    let store = Served::of(free_port(), 2..=3, LONG);
    let mut members = store.members(3);
    assert_eq!(places(&meet(&mut members)), [(0, 0, 3), (0, 1, 3), (0, 2, 3)]);
    let mut node = Node::new(("127.0.0.1".into(), store.port), known(), (0, 3));
    assert!(node.lose(0, "rank 0 failed for good"));
    // The rank beyond their number takes the place that is free.
    assert_eq!(places(&meet_some(&mut members, &[1, 2], 3)), [(1, 1, 2), (1, 0, 2)]);
    assert!(!members[1].wants_to_change());
    members[0] = store.member();
    let (first, others) = members.split_at_mut(1);
    let met = scope(|scope| {
        let comes = scope.spawn(|| first[0].meet((0, 3), LONG).unwrap());
        others.iter_mut().for_each(await_change);
        let meet = |(place, member): (usize, &'_ mut Member)| member.meet((place + 1, 3), LONG).unwrap();
        let others: Vec<_> =
            others.iter_mut().enumerate().map(|each| scope.spawn(move || meet(each))).collect();
        [comes].into_iter().chain(others).map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(places(&met), [(2, 0, 3), (2, 1, 3), (2, 2, 3)]);
    // One more than the run can do without.
    assert!(node.lose(0, "rank 0 failed") && node.lose(1, "rank 1 failed for good"));
    let why = members[2].meet((2, 3), LONG).unwrap_err().to_string();
    assert!(why.contains("rank 1 failed for good; of the ranks 1 are left, wanted 2"), "{why}");
}

#[test]
fn ranks_of_which_no_launcher_speaks_are_waited_for_until_the_last_call() {
    let store = Served::of(free_port(), 2..=4, LAST_CALL);
    let begin = Instant::now();
    let mut members = store.members(4);
    assert_eq!(places(&meet_some(&mut members, &[0, 3], 4)), [(0, 0, 2), (0, 1, 2)]);
    assert!(begin.elapsed() > LAST_CALL);
    // They are expected no more.
    let begin = Instant::now();
    assert_eq!(places(&meet_some(&mut members, &[0, 3], 4)), [(1, 0, 2), (1, 1, 2)]);
    assert!(begin.elapsed() < LAST_CALL, "{:?}", begin.elapsed());
}

#[test]
fn new_processes_begin_no_epoch_while_another_one_runs() {
    let store = Served::of(free_port(), 2..=4, Duration::from_millis(200));
    let mut members = store.members(4);
    meet_some(&mut members, &[0, 1], 4);
    let mut new = [2, 3].map(|rank| store.visit((rank, 4), None).unwrap());
    sleep(Duration::from_millis(500));
    for session in &mut new {
        while let Some((kind, _)) = session.receive(4096).unwrap() {
            assert_eq!(kind, Kind::Waiting);
        }
    }
    drop(new);
    // A rank of the epoch that runs comes, and is not refused.
    assert_eq!(places(&meet_some(&mut members, &[0, 1], 4)), [(1, 0, 2), (1, 1, 2)]);
}

#[test]
fn no_epoch_begins_without_a_rank_that_is_to_be_started_again() {
    let store = Served::of(free_port(), 1..=2, Duration::from_millis(100));
    let mut members = store.members(2);
    let mut node = Node::new(("127.0.0.1".into(), store.port), known(), (0, 2));
    assert!(node.wait(LONG));
    let met = scope(|scope| {
        let [first, second] = members.get_disjoint_mut([0, 1]).unwrap();
        let first = scope.spawn(|| first.meet((0, 2), LONG).unwrap());
        sleep(Duration::from_millis(400));
        [first, scope.spawn(|| second.meet((1, 2), LONG).unwrap())].map(|thread| thread.join().unwrap())
    });
    assert_eq!(places(&met), [(0, 0, 2), (0, 1, 2)]);
}

/// It has not met them itself; the process before it had.
#[test]
fn a_new_process_complains_of_ranks_that_miss_one_and_do_not_come() {
    let store = Served::of(free_port(), 1..=3, LAST_CALL);
    let mut members = store.members(2);
    let mut node = Node::new(("127.0.0.1".into(), store.port), known(), (0, 2));
    meet_some(&mut members, &[0, 1], 3);
    let new = || store.member().with_patience(Duration::from_millis(300));
    let come = |rank| new().meet((rank, 3), Duration::from_millis(900)).unwrap_err();
    let mut heard = || (node.over().is_none(), node.absent().map(|absent| absent.ranks));
    // The epoch goes on well.
    come(2);
    assert_eq!(heard(), (true, None));
    members.truncate(1);
    come(1);
    // Rank 2, which has come once, is expected, too.
    assert_eq!(heard(), (true, Some(vec![0, 2])));
}

/// Whether it waits already when the launcher speaks, or comes later.
#[test]
fn a_rank_has_all_of_its_time_from_when_another_is_started_again() {
    for comes_late in [false, true] {
        let store = Served::new(2);
        let mut members = store.members(2);
        let mut node = Node::new(("127.0.0.1".into(), store.port), known(), (0, 2));
        let mut pause = || assert!(node.wait(Duration::from_secs(2)));
        comes_late.then(&mut pause);
        let met = scope(|scope| {
            let [first, second] = members.get_disjoint_mut([0, 1]).unwrap();
            let first = scope.spawn(|| first.meet((0, 2), Duration::from_secs(2)).unwrap());
            sleep(Duration::from_millis(200));
            (!comes_late).then(&mut pause);
            sleep(Duration::from_millis(2300));
            [first, scope.spawn(|| second.meet((1, 2), LONG).unwrap())].map(|met| met.join().unwrap())
        });
        assert_eq!(places(&met), [(0, 0, 2), (0, 1, 2)]);
    }
}

#[test]
fn ranks_that_have_not_come_yet_are_not_lost() {
    let store = Served::of(free_port(), 2..=4, LAST_CALL);
    let mut members = store.members(4);
    meet_some(&mut members, &[0, 1], 4);
    let mut node = Node::new(("127.0.0.1".into(), store.port), known(), (0, 4));
    assert!(node.lose(1, "rank 1 failed for good"));
    // Two that were not there in time.
    assert_eq!(meet_some(&mut members, &[0, 2, 3], 4).len(), 3);
    assert_eq!(node.over(), None);
}
