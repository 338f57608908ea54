//! Session keyrings that are dumped and joined anew by real tasks.

use rustix::io::Errno;
use sys::boot;
use syscalls::Sysno;

use super::contents::Contents;
use super::told::described;
use super::*;
use crate::task::{ErasedPart, PartState, Phase, ProcessCheck};
use crate::testing::Stage;

macro_rules! needs_keys {
    () => {
        testkit::needs_root!();
        if !keys::are_there() {
            testkit::skip!("a kernel without keys");
        }
    };
}

/// Has a stage join a new session keyring; gives its serial number.
fn join(stage: &mut Stage) -> i32 {
    let serial = stage.call(Sysno::keyctl, &[operation::JOIN_SESSION_KEYRING.into(), 0]);
    i32::try_from(serial).expect("a serial number")
}

/// Has a stage add a key of a type to its session keyring.
fn add_key(stage: &mut Stage, kind: &str, name: &str, contents: &[u8]) -> i64 {
    for (at, text) in [(0, kind), (64, name)] {
        stage.put(at, &[text.as_bytes(), &[0]].concat());
    }
    stage.put(128, contents);
    let data = stage.data();
    let len = contents.len() as u64;
    let session = i64::from(SESSION_KEYRING).cast_unsigned();
    stage.call(Sysno::add_key, &[data, data + 64, data + 128, len, session])
}

fn dumped(stage: &mut Stage) -> Option<Record> {
    let payload = stage.dump(&Keyrings).expect("it is supported");
    payload.map(|payload| Record::decode(&payload[..]).expect("sound"))
}

fn told(stage: &mut Stage) -> Result<Option<Record>> {
    let mut questions = Script::default();
    let asked = Told::ask(&mut questions);
    let answers = stage.answers(&questions);
    Told::new(&asked, &answers).record(stage.pid())
}

/// A record as an image of process 1 has it.
fn state(record: &Record) -> Box<dyn PartState> {
    ErasedPart::decode(&Keyrings, 1, &record.encode_to_vec()).expect("sound")
}

/// Has a fresh stage be as dumped, its keys made as the restorer makes them.
fn restored(record: &Record, uid: u32) -> Stage {
    let state = state(record);
    let made = make([&*state].into_iter()).expect("room for keys");
    let mut inherited = Stage::inherited();
    inherited.set_session(Session::Own(0));
    let credentials = crate::task::credentials::Record {
        uids: vec![uid; 4],
        ..inherited.credentials.clone()
    };
    let owner = Owner {
        pid: 1,
        record: Some(record).filter(|record| record.serial != 0),
        credentials: Some(&credentials),
    };
    let session = owner.session(inherited.session(), Some(&inherited));
    let mut planned = ThreadPlan::default();
    plan(
        owner,
        (inherited.session(), session),
        (&inherited, &made),
        &mut planned,
    )
    .expect("possible");
    let mut fresh = Stage::new();
    fresh.run_plan(planned);
    fresh
}

#[test]
fn a_session_keyring_with_its_keys_survives() {
    needs_keys!();
    testkit::needs_kernel_memory!();
    let mut stage = Stage::new();
    join(&mut stage);
    let first = add_key(&mut stage, "user", "first", b"one").cast_unsigned();
    let second = add_key(&mut stage, "user", "second", &[7; 3000]).cast_unsigned();
    stage.call(Sysno::keyctl, &[operation::CHOWN.into(), first, 1000, 1001]);
    stage.call(
        Sysno::keyctl,
        &[operation::SETPERM.into(), first, 0x0b0b_0000],
    );
    stage.call(Sysno::keyctl, &[15, second, 1000]);
    let special = |which: i32| i64::from(which).cast_unsigned();
    let session = special(SESSION_KEYRING);
    stage.call(
        Sysno::keyctl,
        &[operation::LINK.into(), special(USER_KEYRING), session],
    );
    stage.call(
        Sysno::keyctl,
        &[operation::CHOWN.into(), session, 65534, 65534],
    );
    ProcessCheck::default()
        .thread(&stage)
        .expect("it is supported");
    let record = dumped(&mut stage).expect("one of its own");
    assert_eq!(
        (record.uid, record.gid, record.permissions),
        (65534, 65534, 0x3f03_0000)
    );
    assert_eq!(
        (record.keys.len(), &record.links[..]),
        (2, &[USER_KEYRING][..])
    );
    assert_eq!((record.keys[0].uid, record.keys[0].gid), (1000, 1001));
    assert_eq!(
        (&record.keys[0].contents[..], record.keys[0].permissions),
        (&b"one"[..], 0x0b0b_0000)
    );
    let mut again = restored(&record, 0);
    let mut seen = dumped(&mut again).expect("one of its own");
    assert_ne!(seen.serial, record.serial);
    let ends = [&record, &seen].map(|one| one.keys[1].expires_s);
    assert!(ends[0].abs_diff(ends[1]) <= 5, "{ends:?}");
    (seen.serial, seen.keys[1].expires_s) = (record.serial, ends[0]);
    assert_eq!(seen, record);
}

#[test]
fn a_revoked_session_keyring_is_revoked_again() {
    needs_keys!();
    testkit::needs_kernel_memory!();
    let mut stage = Stage::new();
    join(&mut stage);
    add_key(&mut stage, "user", "first", b"one");
    let session = i64::from(SESSION_KEYRING).cast_unsigned();
    stage.call(Sysno::keyctl, &[operation::REVOKE.into(), session]);
    let record = dumped(&mut stage).expect("one of its own");
    assert!(record.is_revoked && record.keys.is_empty(), "{record:?}");
    let mut again = restored(&record, 0);
    let gone = -i64::from(Errno::KEYREVOKED.raw_os_error());
    assert_eq!(
        again.attempt(
            Sysno::keyctl,
            &[operation::GET_KEYRING_ID.into(), session, 0]
        ),
        gone
    );
    assert!(dumped(&mut again).expect("one of its own").is_revoked);
}

#[test]
fn a_task_without_one_does_not_get_the_restorers() {
    needs_keys!();
    testkit::needs_kernel_memory!();
    let mut again = restored(&Record::default(), 0);
    let record = dumped(&mut again).expect("a new one");
    assert_eq!(
        (record.keys.len(), &record.links[..]),
        (0, &[USER_SESSION_KEYRING][..])
    );
}

#[test]
fn keys_that_cannot_be_saved_are_refused_by_name() {
    needs_keys!();
    testkit::needs_kernel_memory!();
    let mut stage = Stage::new();
    let serial = join(&mut stage);
    add_key(&mut stage, "logon", "a:b", b"secret");
    let error = ProcessCheck::default()
        .thread(&stage)
        .expect_err("nobody may read it")
        .to_string();
    let want = format!(
        "pid {}: key a:b in its session keyring is not supported: \
         only keys of type user are saved",
        stage.pid()
    );
    assert_eq!(error, want);
    let error = told(&mut stage).expect_err("nobody tells it").to_string();
    assert!(
        error.contains("its session keyring is not supported"),
        "{error}"
    );
    assert_ne!(own_session(), Session::Own(serial));
    for (which, what) in [(PROCESS_KEYRING, "process"), (THREAD_KEYRING, "thread")] {
        let mut stage = Stage::new();
        let which = i64::from(which).cast_unsigned();
        stage.call(Sysno::keyctl, &[operation::GET_KEYRING_ID.into(), which, 1]);
        ProcessCheck::default().thread(&stage).expect("it is empty");
        stage.put(0, b"user\0");
        stage.put(64, b"name\0");
        let data = stage.data();
        stage.call(Sysno::add_key, &[data, data + 64, data, 3, which]);
        let error = ProcessCheck::default()
            .thread(&stage)
            .expect_err("it has a key")
            .to_string();
        assert!(
            error.contains(&format!("keys of its {what} keyring")),
            "{error}"
        );
        let error = told(&mut stage).expect_err("it has a key").to_string();
        assert!(
            error.contains(&format!("keys of its {what} keyring")),
            "{error}"
        );
    }
    let mut stage = Stage::new();
    stage.call(Sysno::keyctl, &[operation::SET_REQKEY_KEYRING.into(), 3]);
    let error = ProcessCheck::default()
        .thread(&stage)
        .expect_err("it has chosen")
        .to_string();
    assert!(error.contains("KEYCTL_SET_REQKEY_KEYRING"), "{error}");
}

#[test]
fn a_task_tells_of_its_session_keyring_itself() {
    needs_keys!();
    let mut stage = Stage::new();
    if own_session() == Session::Default {
        assert_eq!(told(&mut stage).expect("it is supported"), None);
    }
    let serial = join(&mut stage);
    let session = i64::from(SESSION_KEYRING).cast_unsigned();
    let user = i64::from(USER_KEYRING).cast_unsigned();
    stage.call(Sysno::keyctl, &[operation::LINK.into(), user, session]);
    let record = told(&mut stage)
        .expect("it is supported")
        .expect("one of its own");
    assert_eq!(
        (record.serial, record.uid, &record.name[..]),
        (serial, 0, &b"_ses"[..])
    );
    assert_eq!(
        (record.permissions, &record.links[..]),
        (0x3f03_0000, &[USER_KEYRING][..])
    );
    stage.call(Sysno::keyctl, &[operation::REVOKE.into(), session]);
    let record = told(&mut stage)
        .expect("it is supported")
        .expect("one of its own");
    assert!(record.is_revoked);
}

#[test]
fn what_is_in_the_dumpers_own_is_only_kept_there() {
    let missing = || unshared(7, 8);
    let contents = || Contents {
        obstacle: Some(missing()),
        ..Contents::default()
    };
    let record = Record {
        serial: 5,
        ..Record::default()
    };
    let error = record
        .clone()
        .with(contents(), false)
        .expect_err("another's")
        .to_string();
    assert_eq!(error, missing().to_string());
    let record = record.with(contents(), true).expect("it stays there");
    let owner = Owner {
        pid: 1,
        record: Some(&record),
        credentials: None,
    };
    let inherited = Stage::inherited();
    let planned = |born| {
        let session = owner.session(born, Some(&inherited));
        let mut planned = ThreadPlan::default();
        plan(
            owner,
            (born, session),
            (&inherited, &Made::new()),
            &mut planned,
        )?;
        Ok::<_, Error>(planned.take(Phase::Fork).to_string())
    };
    assert_eq!(planned(Session::Own(5)).expect("the same"), "");
    let error = planned(Session::Own(6)).expect_err("another").to_string();
    let want = "task 1: session keyring: its session keyring was that of the dump, with the \
                session keyring that it shares with pid 8";
    assert_eq!(error, want);
}

#[test]
fn calls_are_made_in_an_order_that_works() {
    let key = UserKey {
        description: b"x".to_vec(),
        contents: b"y".to_vec(),
        uid: 5,
        gid: 6,
        permissions: 0x3f01_0000,
        expires_s: 0,
    };
    let record = Record {
        serial: 7,
        uid: 8,
        gid: 9,
        permissions: 0x3f03_0000,
        keys: vec![key],
        links: vec![USER_KEYRING],
        ..Record::default()
    };
    let owner = Owner {
        pid: 1,
        record: Some(&record),
        credentials: None,
    };
    let inherited = crate::Inherited::default();
    let made = Made::from([(7, vec![4711])]);
    let mut planned = ThreadPlan::default();
    let sessions = (Session::Default, Session::Own(7));
    plan(owner, sessions, (&inherited, &made), &mut planned).expect("possible");
    let text = [Phase::Fork, Phase::Last]
        .map(|phase| planned.take(phase).to_string())
        .concat();
    insta::assert_snapshot!(text, @r"
    keyctl(KEYCTL_JOIN_SESSION_KEYRING, name=0)  # session keyring
    keyctl(KEYCTL_LINK, key=4711, keyring=-3)
    keyctl(KEYCTL_CHOWN, key=4711, uid=5, gid=6)
    keyctl(KEYCTL_SETPERM, key=4711, mask=0x3f010000)
    keyctl(KEYCTL_CHOWN, key=-3, uid=8, gid=9)
    keyctl(KEYCTL_SETPERM, key=-3, mask=0x3f030000)
    keyctl(KEYCTL_LINK, key=-4, keyring=-3)
    ");
}

#[test]
fn sessions_follow_who_makes_whom() {
    let inherited = crate::Inherited::default();
    let credentials = inherited.credentials.clone();
    let mut user = inherited.credentials.clone();
    user.uids = vec![1000; 4];
    let default = |credentials| Owner {
        pid: 1,
        record: None,
        credentials: Some(credentials),
    };
    let session = |owner: Owner<'_>, born, root| owner.session(born, root);
    let (root, users) = (default(&credentials), default(&user));
    assert_eq!(
        session(root, Session::Default, Some(&inherited)),
        Session::Default
    );
    assert_eq!(
        session(users, Session::Default, Some(&inherited)),
        Session::Default
    );
    let mut set = inherited.clone();
    set.session_is_unset = crate::inherited::OnNeed::Known(false);
    assert_eq!(
        session(root, Session::Default, Some(&set)),
        Session::Default
    );
    assert_eq!(
        session(users, Session::Default, Some(&set)),
        Session::Substitute(1000)
    );
    assert_eq!(
        session(root, Session::Own(3), Some(&inherited)),
        Session::Substitute(0)
    );
    assert_eq!(
        session(users, Session::Substitute(0), None),
        Session::Substitute(1000)
    );
    assert_eq!(session(users, Session::Default, None), Session::Default);
}

#[test]
fn the_kernels_words_are_understood() {
    let record = described(b"keyring;1000;100;3f1b0000;a;b\0\0", 9).expect("understood");
    let want = (9, 1000, 100, 0x3f1b_0000, &b"a;b"[..]);
    let got = (
        record.serial,
        record.uid,
        record.gid,
        record.permissions,
        &record.name[..],
    );
    assert_eq!(got, want);
    for wrong in [&b""[..], b"keyring;1;2", b"keyring;1;2;x;_ses"] {
        assert_eq!(described(wrong, 9), None);
    }
}

#[test]
fn a_number_of_another_boot_is_another_keyring() {
    let record = |boot: &str| Record {
        serial: 5,
        boot: boot.to_owned(),
        ..Record::default()
    };
    let (this, other) = (record(boot::id().expect("an id")), record("another"));
    let seen = |own, record: &Record| of_restorer(own, [&*state(record)].into_iter());
    assert_eq!(seen(Session::Own(5), &this), Session::Own(5));
    assert_eq!(seen(Session::Own(5), &other), Session::Own(0));
    assert_eq!(seen(Session::Default, &other), Session::Default);
}

#[test]
fn own_session_keyring_is_found_as_a_child_finds_it() {
    needs_keys!();
    testkit::needs_kernel_memory!();
    crate::kernel::credentials::prepare();
    let check = || {
        let serial = own_session_serial().expect("the places are known");
        let asked = keys::own_session().expect("a child asks");
        let asked = asked.expect("this kernel has keys");
        match own_session() {
            Session::Own(own) => assert_eq!((own, asked), (serial, keys::Session::Own(serial))),
            _ => assert_eq!(asked, keys::Session::Default),
        }
        serial
    };
    let before = check();
    let (inner, serial) =
        testkit::calls::in_new_session(|serial| (check(), serial)).expect("a keyring");
    assert_eq!(inner, serial);
    assert_ne!(inner, before);
    assert_eq!(check(), before, "a look gives nobody a keyring");
}
