//! Credentials unlike root's: ids, groups, capabilities with inheritable and ambient ones,
//! securebits, no_new_privs, names, slack, niceness, umask. Argument `root` keeps the uid 0.
//!
//! `ids` answers what the calls of the task itself say.
use rustix::process::{
    DumpableBehavior, Signal, getgroups, set_dumpable_behavior, set_parent_process_death_signal,
    setpriority_process, umask,
};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid, capabilities,
    capabilities_secure_bits, configure_capability_in_ambient_set,
    remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits,
    set_current_timer_slack, set_keep_capabilities, set_name, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use super::{Control, Failure, not_understood};

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let keeps_root = arguments.first().is_some_and(|word| word == "root");
    setpriority_process(None, 5)?;
    umask(rustix::fs::Mode::from_raw_mode(0o137));
    set_name(c"some creds")?;
    set_current_timer_slack(std::num::NonZeroU64::new(123_456))?;
    let gids = [100, 1234, 99_999].map(Gid::from_raw);
    set_thread_groups(&gids)?;
    set_thread_res_gid(Gid::from_raw(21), Gid::from_raw(22), Gid::from_raw(23))?;
    remove_capability_from_bounding_set(CapabilitySet::SYS_BOOT)?;
    set_capabilities_secure_bits(
        CapabilitiesSecureBits::KEEP_CAPS | CapabilitiesSecureBits::NO_SETUID_FIXUP,
    )?;
    if !keeps_root {
        set_keep_capabilities(true)?;
        set_thread_res_uid(Uid::from_raw(11), Uid::from_raw(12), Uid::from_raw(13))?;
    }
    let kept = CapabilitySet::CHOWN | CapabilitySet::NET_RAW | CapabilitySet::SETPCAP;
    set_capabilities(
        None,
        CapabilitySets {
            effective: CapabilitySet::CHOWN,
            permitted: kept,
            inheritable: CapabilitySet::NET_RAW,
        },
    )?;
    configure_capability_in_ambient_set(CapabilitySet::NET_RAW, true)?;
    set_no_new_privs(true)?;
    // One that does no harm: whoever restored the task may end after that.
    set_parent_process_death_signal(Some(Signal::WINCH))?;
    // A change of ids makes a task undumpable, and its /proc files root's.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    control.serve(|question| match question.verb.as_str() {
        "ids" => Ok(format!(
            "{:?} {:?} {:?} {:?} {:?} {:?}",
            getgroups()?,
            capabilities(None)?,
            capabilities_secure_bits()?,
            rustix::process::parent_process_death_signal()?,
            rustix::process::dumpable_behavior()?,
            rustix::thread::no_new_privs()?,
        )),
        _ => not_understood(question),
    })
}
