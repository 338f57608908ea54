//! `serve-storm`: attacks the page server of microVMs, longer than the tests do.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use testkit::serve_storm;

/// Attacks `stillframe serve`; ends at the first attack that it does not withstand.
#[derive(Parser)]
struct Arguments {
    /// What is done; everything where nothing is said.
    #[arg(value_enum)]
    attacks: Vec<Attack>,
    /// How many times, instead of the attack's own number.
    #[arg(long)]
    rounds: Option<u64>,
    /// The first seed.
    #[arg(long, default_value_t = 1000)]
    from: u64,
    /// The command under test.
    #[arg(long, env = "STILLFRAME_BIN")]
    stillframe: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Attack {
    /// Malformed hand-offs: 1,000.
    Malformed,
    /// Sessions at once: 100.
    Crowd,
    /// Kills of the server at random instants: 200.
    Kills,
    /// Rounds of faults, removals, prefetch and differences at once: 200.
    Fire,
    /// The same, while the server is replaced over and over: 60 rounds.
    Successions,
    /// Machines that share what they read: 100.
    Shared,
}

fn main() {
    let arguments = Arguments::parse();
    let (stillframe, from) = (&arguments.stillframe, arguments.from);
    let all = Attack::value_variants().iter();
    let wanted = all.filter(|one| arguments.attacks.is_empty() || arguments.attacks.contains(one));
    for attack in wanted {
        let began = Instant::now();
        let rounds = |usual| arguments.rounds.unwrap_or(usual);
        match attack {
            Attack::Malformed => serve_storm::malformed(stillframe, from, rounds(1000)),
            Attack::Crowd => serve_storm::crowd(stillframe, rounds(100) as usize),
            Attack::Kills => serve_storm::kills(stillframe, from, rounds(200)),
            Attack::Fire => serve_storm::fire(stillframe, from, rounds(200)),
            Attack::Shared => {
                let held_bytes = serve_storm::shared(stillframe, rounds(100));
                println!("they hold {held_bytes} bytes");
            }
            Attack::Successions => serve_storm::successions(stillframe, from, rounds(60)),
        }
        println!(
            "{attack:?}: withstood, {:.0} s",
            began.elapsed().as_secs_f64()
        );
    }
}
