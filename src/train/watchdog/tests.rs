use super::*;

/// A healthy step.
fn step(loss: f64) -> Observation {
    Observation {
        loss,
        grad_norm: 0.5,
        skipped: None,
        is_scale_search: false,
        learning_rate: 1e-4,
        adapters_digest: None,
    }
}

/// Losses that fall and waver, as training losses do.
fn healthy(index: u32) -> f64 {
    2.0 * (-f64::from(index) / 300.0).exp() + 0.6 + 0.3 * f64::from(index * 7919 % 101) / 101.0
}

fn after_healthy_steps(num_steps: u32) -> Watchdog {
    let mut watchdog = Watchdog::default();
    for index in 0..num_steps {
        let verdict = watchdog.observe(&WatchdogConfig::default(), &step(healthy(index)));
        assert_eq!(verdict, Verdict::default(), "step {index}");
    }
    watchdog
}

#[test]
fn a_healthy_run_is_left_alone() {
    after_healthy_steps(2000);
}

#[test]
fn one_spike_is_warned_of_and_forgotten() {
    let config = WatchdogConfig::default();
    let mut watchdog = after_healthy_steps(200);
    let verdict = watchdog.observe(&config, &step(4.0));
    assert_eq!((verdict.anomaly, verdict.stop), (Some(Anomaly::LossSpike), None));
    assert!(verdict.warning.unwrap().contains("standard deviations above"));
    assert_eq!(watchdog.observe(&config, &step(healthy(200))), Verdict::default());
    // The mean has not risen so far that the next spike is missed.
    assert_eq!(watchdog.observe(&config, &step(4.0)).anomaly, Some(Anomaly::LossSpike));
}

#[test]
fn a_loss_that_has_diverged_stops_the_run_after_its_patience_and_warns_once() {
    let config = WatchdogConfig { patience: 12, ..WatchdogConfig::default() };
    // Late in a run, and in the first steps without a known deviation: once the start is known, after eight losses.
    for (num_steps, stop_at) in [(200, 12), (3, 16)] {
        let mut watchdog = after_healthy_steps(num_steps);
        let mut warnings = 0;
        for count in 1..=stop_at {
            let verdict = watchdog.observe(&config, &step(9.0));
            warnings += u32::from(verdict.warning.is_some());
            assert_eq!(verdict.stop.is_some(), count == stop_at, "after {count} such steps");
        }
        assert_eq!(warnings, 1);
        watchdog.forgive();
        assert_eq!(watchdog.observe(&config, &step(9.0)).stop, None);
    }
}

#[test]
fn harder_rows_become_the_normal_before_patience_is_over() {
    let config = WatchdogConfig::default();
    let mut watchdog = after_healthy_steps(300);
    let anomalies = (0..400)
        .map(|index| watchdog.observe(&config, &step(healthy(index) + 2.0)))
        .inspect(|verdict| assert_eq!(verdict.stop, None))
        .filter(|verdict| verdict.anomaly.is_some())
        .count();
    assert!((1..20).contains(&anomalies), "{anomalies}");
}

#[test]
fn an_evaluation_before_the_first_step_says_where_the_loss_starts() {
    let config = WatchdogConfig { patience: 12, ..WatchdogConfig::default() };
    // The first rows happen to be easy.
    let mut watchdog = Watchdog::default();
    watchdog.start_at(3.0);
    let easy_then_usual = [0.1; 10].into_iter().chain([3.5; 10]);
    assert!(
        easy_then_usual.map(|loss| watchdog.observe(&config, &step(loss))).all(|verdict| verdict.anomaly.is_none())
    );
    // A learning rate that ruins the model with the first update.
    let mut watchdog = Watchdog::default();
    watchdog.start_at(2.5);
    watchdog.observe(&config, &step(2.6));
    assert!((0..18).any(|_| watchdog.observe(&config, &step(6.0)).stop.is_some()));
}

#[test]
fn an_odd_first_row_does_not_make_a_healthy_run_look_diverged() {
    for odd in [&[0.05][..], &[0.1, 0.3]] {
        let mut watchdog = Watchdog::default();
        let losses = odd.iter().copied().chain((0..200).map(|index| healthy(index) + 1.0));
        for (index, loss) in losses.enumerate() {
            assert_eq!(watchdog.observe(&WatchdogConfig::default(), &step(loss)).stop, None, "step {index}");
            assert_eq!(watchdog.spike_steps, 0, "step {index}");
        }
    }
}

#[test]
fn skipped_steps_in_a_row_stop_the_run_and_an_update_in_between_begins_anew() {
    let config = WatchdogConfig { max_skipped_steps: 3, ..WatchdogConfig::default() };
    let skipped = Observation { skipped: Some(SkipReason::NonFiniteLoss), ..step(f64::NAN) };
    let mut watchdog = Watchdog::default();
    let stops =
        |watchdog: &mut Watchdog, observation: &Observation| watchdog.observe(&config, observation).stop.is_some();
    assert!(!stops(&mut watchdog, &skipped) && !stops(&mut watchdog, &skipped));
    assert!(!stops(&mut watchdog, &step(1.0)));
    assert!(!stops(&mut watchdog, &skipped) && !stops(&mut watchdog, &skipped));
    let verdict = watchdog.observe(&config, &skipped);
    assert_eq!(verdict.anomaly, Some(Anomaly::SkippedStep));
    assert!(verdict.stop.unwrap().starts_with("3 steps in a row made no update"));
    // Losses that are not finite are in no mean.
    assert_eq!((watchdog.num_losses, watchdog.mean), (1, 1.0));
}

#[test]
fn the_search_for_a_loss_scale_is_no_anomaly_and_ends_before_patience_does() {
    let search = Observation { skipped: Some(SkipReason::NonFiniteGradient), is_scale_search: true, ..step(1.0) };
    let mut watchdog = Watchdog::default();
    for _ in 0..16 {
        assert_eq!(watchdog.observe(&WatchdogConfig::default(), &search), Verdict::default());
    }
}

#[test]
fn gradients_of_zero_are_warned_of_and_stop_the_run() {
    let config = WatchdogConfig { patience: 2, ..WatchdogConfig::default() };
    let mut watchdog = Watchdog::default();
    let zero = Observation { grad_norm: 0.0, ..step(1.0) };
    let first = watchdog.observe(&config, &zero);
    assert_eq!((first.anomaly, first.stop), (Some(Anomaly::ZeroGradient), None));
    assert!(watchdog.observe(&config, &zero).stop.unwrap().contains("for 2 steps"));
}

#[test]
fn adapters_that_do_not_move_are_noticed_unless_nothing_should_have_moved_them() {
    let config = WatchdogConfig { patience: 20, ..WatchdogConfig::default() };
    let mut watchdog = Watchdog::default();
    let mut look = |learning_rate: f64, digest: u64| {
        for _ in 1..LOOK_STEPS {
            watchdog.observe(&config, &Observation { learning_rate, ..step(1.0) });
        }
        watchdog.observe(&config, &Observation { learning_rate, adapters_digest: Some(digest), ..step(1.0) })
    };
    assert_eq!(look(1e-4, 1), Verdict::default());
    assert_eq!(look(1e-4, 2), Verdict::default());
    assert_eq!(look(0.0, 2), Verdict::default());
    let first = look(1e-60, 2);
    assert_eq!((first.anomaly, first.stop), (Some(Anomaly::UnmovedAdapters), None));
    assert!(look(1e-60, 2).stop.unwrap().contains("20 updates ago"));
    assert_eq!(look(1e-4, 3), Verdict::default());
}

#[test]
fn what_is_turned_off_says_nothing() {
    let config = WatchdogConfig { max_skipped_steps: 0, loss_spike_z: 0.0, patience: 0 };
    let mut watchdog = Watchdog::default();
    for _ in 0..200 {
        let skipped = Observation { skipped: Some(SkipReason::NonFiniteLoss), ..step(f64::NAN) };
        assert_eq!(watchdog.observe(&config, &skipped).stop, None);
        let verdict = watchdog.observe(&config, &Observation { grad_norm: 0.0, ..step(1.0) });
        assert_eq!(verdict.stop, None);
    }
    assert_eq!(watchdog.observe(&config, &step(50.0)), Verdict::default());
}

#[test]
fn a_watchdog_from_a_checkpoint_judges_as_the_one_that_was_saved() {
    let mut watchdog = after_healthy_steps(123);
    let mut restored: Watchdog = serde_json::from_str(&serde_json::to_string(&watchdog).unwrap()).unwrap();
    assert_eq!(restored, watchdog, "bit for bit");
    for index in 123..400 {
        let loss = if index % 17 == 0 { 5.0 } else { healthy(index) };
        let config = WatchdogConfig::default();
        assert_eq!(restored.observe(&config, &step(loss)), watchdog.observe(&config, &step(loss)));
    }
    assert_eq!(restored, watchdog);
}

#[test]
fn an_update_now_and_then_does_not_hide_that_most_steps_make_none() {
    let skipped = Observation { skipped: Some(SkipReason::NonFiniteLoss), ..step(f64::NAN) };
    let config = WatchdogConfig::default();
    let stops_at = |every: u64, is_scale_search: bool| {
        let mut watchdog = after_healthy_steps(100);
        (1..=500).find(|number: &u64| {
            let observation = if number.is_multiple_of(every) {
                step(healthy(300))
            } else {
                Observation { is_scale_search, ..skipped }
            };
            watchdog.observe(&config, &observation).stop.is_some()
        })
    };
    // Stops at 33 skips in the last 64 steps: here at step 35. With every other step skipped there are at most 32.
    assert_eq!((stops_at(15, false), stops_at(2, false)), (Some(35), None));
    // Rows without targets are no sign of other trouble.
    let empty = Observation { skipped: Some(SkipReason::NoTargetTokens), ..step(f64::NAN) };
    let mut watchdog = after_healthy_steps(100);
    let before = watchdog;
    for number in 0..500 {
        assert_eq!(watchdog.observe(&config, &empty), Verdict::default(), "step {number}");
    }
    assert_eq!(watchdog, before);
    // Skips by the scale search are normal, unless it never finds a scale.
    assert_eq!((stops_at(15, true), stops_at(1000, true)), (None, Some(20)));
}

#[test]
fn trouble_is_what_has_not_passed_yet() {
    let skipped = Observation { skipped: Some(SkipReason::NonFiniteLoss), ..step(f64::NAN) };
    let config = WatchdogConfig::default();
    let mut watchdog = after_healthy_steps(100);
    assert_eq!(watchdog.trouble(), None);
    watchdog.observe(&config, &skipped);
    assert_eq!(watchdog.trouble(), None, "one odd batch");
    watchdog.observe(&config, &skipped);
    assert_eq!(watchdog.trouble().unwrap(), "2 of the last 64 steps made no update");
    for index in 0..64 {
        watchdog.observe(&config, &step(healthy(100 + index)));
    }
    assert_eq!(watchdog.trouble(), None);
    watchdog.observe(&config, &step(9.0));
    assert_eq!(watchdog.trouble().unwrap(), "the loss was far too high");
    watchdog.observe(&config, &Observation { grad_norm: 0.0, ..step(healthy(200)) });
    assert_eq!(watchdog.trouble().unwrap(), "every gradient was exactly zero");
}
