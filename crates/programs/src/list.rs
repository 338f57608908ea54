//! The programs, what they do, and where they come from.
use std::path::Path;

use crate::error::Result;
use crate::steps::Recipe;
use crate::{Package, Program, Work, clients, database, emulator, serve};

/// How a program is started, in an empty folder of its own.
pub enum Start {
    /// It works in steps.
    Steps(Recipe),
    /// It serves clients.
    Serve(serve::Recipe<'static>),
    /// In a way of its own.
    Own(fn(&Path) -> Result<Box<dyn Work>>),
}

/// Why what a live dump saved of a data base is not restored.
const DATA: &str = "its files go on";
/// The same of a server.
const PEERS: &str = "its connections go on";

/// Files in `crates/programs/scripts`, with their contents.
macro_rules! files {
    ($($name:literal),*) => {
        &[$(($name, include_str!(concat!("../scripts/", $name)))),*]
    };
}

/// A package of Debian's that starts no service.
const fn package(name: &'static str, program: &'static str, reason: &'static str) -> Package {
    Package {
        name,
        program,
        reason,
        services: &[],
    }
}

/// What is the same of most programs.
const fn program(
    name: &'static str,
    doing: &'static str,
    packages: &'static [Package],
    start: Start,
) -> Program {
    Program {
        name,
        doing,
        packages,
        options: &[],
        moves_on: None,
        start,
    }
}

/// A server whose clients stay connected.
const fn server(
    name: &'static str,
    doing: &'static str,
    packages: &'static [Package],
    start: Start,
) -> Program {
    Program {
        name,
        doing,
        packages,
        options: &["--tcp-established"],
        moves_on: Some(PEERS),
        start,
    }
}

const PYTHON: &str = "/usr/bin/python3";

/// All programs.
pub const PROGRAMS: &[Program] = &[
    program(
        "node",
        "four worker threads hash and sort; thread pool, timers, a child's pipes",
        &[package("nodejs", "node", "JavaScript in threads")],
        Start::Steps(Recipe::new(files!("worker.js"), &["node", "worker.js"])),
    ),
    program(
        "java",
        "parallel streams, executors and a parallel collector",
        &[package(
            "default-jdk-headless",
            "javac",
            "a JIT and its collector's threads",
        )],
        Start::Steps(Recipe::new(
            files!("Steps.java"),
            &["java", "-Xmx192m", "-XX:+UseParallelGC", "Steps.java"],
        )),
    ),
    program(
        "luajit",
        "compiled traces, structures of the FFI, coroutines",
        &[package("luajit", "luajit", "a tracing JIT")],
        Start::Steps(Recipe::new(files!("steps.lua"), &["luajit", "steps.lua"])),
    ),
    Program {
        options: &["--file-locks"],
        ..program(
            "php",
            "code of the JIT in shared memory, generators, a socket pair",
            &[package("php-cli", "php", "a JIT in shared memory")],
            Start::Steps(Recipe::new(
                files!("steps.php"),
                &[
                    "php",
                    "-dopcache.enable_cli=1",
                    "-dopcache.jit_buffer_size=32M",
                    "-dopcache.jit=tracing",
                    "steps.php",
                ],
            )),
        )
    },
    program(
        "ruby",
        "threads, fibers, a child's pipes, garbage",
        &[package(
            "ruby",
            "ruby",
            "an interpreter with a timer's thread",
        )],
        Start::Steps(Recipe::new(files!("steps.rb"), &["ruby", "steps.rb"])),
    ),
    program(
        "perl",
        "an interval timer's signals, regular expressions, a child",
        &[package("perl", "perl", "an interpreter")],
        Start::Steps(Recipe::new(files!("steps.pl"), &["perl", "steps.pl"])),
    ),
    program(
        "guile",
        "threads, big numbers, the collector",
        &[package(
            "guile-3.0",
            "guile",
            "a JIT and a collector that stops threads by signals",
        )],
        Start::Steps(Recipe::new(
            files!("steps.scm"),
            &["guile", "--no-auto-compile", "steps.scm"],
        )),
    ),
    program(
        "R",
        "fits, draws into a file, a forked child",
        &[package("r-base-core", "R", "numeric work")],
        Start::Steps(Recipe::new(
            files!("steps.R"),
            &["Rscript", "--vanilla", "steps.R"],
        )),
    ),
    program(
        "erlang",
        "500 processes in a ring, a table, a port",
        &[package("erlang-base", "erl", "schedulers in threads")],
        Start::Steps(Recipe::new(
            files!("steps.erl"),
            &[
                "sh",
                "-c",
                "erlc steps.erl && exec erl -noshell -noinput +S 2 -s steps main",
            ],
        )),
    ),
    program(
        "numpy",
        "OpenBLAS multiplies matrices in threads, beside Python's own threads",
        &[
            package("python3-numpy", "f2py3", "numeric Python"),
            package(
                "libopenblas0-pthread",
                "/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3",
                "the threads of numeric Python",
            ),
        ],
        Start::Steps(Recipe::new(files!("blas.py"), &[PYTHON, "blas.py"])),
    ),
    Program {
        options: &["--file-locks"],
        moves_on: Some(DATA),
        ..program(
            "sqlite",
            "transactions with a write-ahead log, and a process that reads",
            &[
                package(
                    "libsqlite3-0",
                    "/usr/lib/x86_64-linux-gnu/libsqlite3.so.0",
                    "a data base in files",
                ),
                package("python3", "python3", "runs SQLite"),
            ],
            Start::Steps(Recipe::new(files!("writer.py"), &[PYTHON, "writer.py"])),
        )
    },
    Program {
        moves_on: Some(PEERS),
        options: &["--tcp-established"],
        ..program(
            "postgres",
            "pgbench's four connections",
            &[Package {
                services: &["postgresql.service"],
                ..package(
                    "postgresql",
                    "pgbench",
                    "a data base with a process a client",
                )
            }],
            Start::Own(database::postgres),
        )
    },
    Program {
        options: &["--tcp-established", "--file-locks"],
        ..server(
            "mariadb",
            "three clients' transactions, without the kernel's asynchronous input and output",
            MARIADB,
            Start::Own(|folder| database::mariadb(folder, "--skip-innodb-use-native-aio")),
        )
    },
    Program {
        options: &["--tcp-established", "--file-locks"],
        ..server(
            "mariadb-aio",
            "the same with it",
            MARIADB,
            Start::Own(|folder| database::mariadb(folder, "--innodb-use-native-aio")),
        )
    },
    server(
        "redis",
        "three clients count and store",
        &[Package {
            services: &["redis-server.service"],
            ..package("redis-server", "redis-server", "an event loop and threads")
        }],
        Start::Serve(serve::Recipe {
            greet: clients::silent,
            exchange: clients::redis,
            ..serve::Recipe::new(
                &[],
                &[
                    "redis-server",
                    "--port",
                    "{port}",
                    "--save",
                    "",
                    "--io-threads",
                    "2",
                ],
            )
        }),
    ),
    server(
        "memcached",
        "three clients count and store",
        MEMCACHED,
        Start::Serve(serve::Recipe {
            greet: clients::memcached_greet,
            exchange: clients::memcached,
            ..serve::Recipe::new(&[], &["memcached", "-u", "root", "-p", "{port}", "-U", "0"])
        }),
    ),
    server(
        "nginx",
        "two workers send a file to three clients",
        &[Package {
            services: &["nginx.service"],
            ..package("nginx-light", "nginx", "a master and its workers")
        }],
        Start::Serve(serve::Recipe {
            greet: clients::silent,
            exchange: clients::http,
            ..serve::Recipe::new(NGINX_FILES, &["nginx", "-c", "{folder}/nginx.conf"])
        }),
    ),
    server(
        "haproxy",
        "passes three clients on to a memcached by unix sockets, all in one tree",
        HAPROXY,
        Start::Serve(serve::Recipe {
            greet: clients::memcached_greet,
            exchange: clients::memcached,
            ..serve::Recipe::new(
                files!("haproxy.cfg"),
                &[
                    "sh",
                    "-c",
                    "memcached -u root -s memcached.sock & haproxy -q -db -f haproxy.cfg",
                ],
            )
        }),
    ),
    server(
        "caddy",
        "sends a file to three clients, out of Go's goroutines",
        &[Package {
            services: &["caddy.service"],
            ..package("caddy", "caddy", "Go's runtime")
        }],
        Start::Serve(serve::Recipe {
            greet: clients::silent,
            exchange: clients::http,
            ..serve::Recipe::new(
                &[("data", clients::NUMBERS)],
                &[
                    "caddy",
                    "file-server",
                    "--listen",
                    "127.0.0.1:{port}",
                    "--root",
                    "{folder}",
                ],
            )
        }),
    ),
    server(
        "mosquitto",
        "three clients send messages to themselves",
        &[Package {
            services: &["mosquitto.service"],
            ..package("mosquitto", "mosquitto", "a message broker")
        }],
        Start::Serve(serve::Recipe {
            greet: clients::mqtt_greet,
            exchange: clients::mqtt,
            ..serve::Recipe::new(
                files!("mosquitto.conf"),
                &["mosquitto", "-c", "{folder}/mosquitto.conf"],
            )
        }),
    ),
    server(
        "rabbitmq",
        "three clients send messages to themselves, through Erlang's processes",
        &[Package {
            services: &["rabbitmq-server.service", "epmd.service", "epmd.socket"],
            ..package(
                "rabbitmq-server",
                "rabbitmq-server",
                "a message broker in Erlang",
            )
        }],
        Start::Serve(serve::Recipe {
            greet: clients::stomp_greet,
            exchange: clients::stomp,
            ..serve::Recipe::new(
                files!("rabbitmq.sh", "rabbitmq.conf"),
                &["sh", "rabbitmq.sh", "{port}"],
            )
        }),
    ),
    Program {
        moves_on: Some(DATA),
        ..program(
            "make",
            "make -j2 compiles C and C++",
            &[
                package("make", "make", "runs compilers side by side"),
                package("g++", "g++", "compilers"),
            ],
            Start::Steps(Recipe::repeated(
                files!("repeat.sh", "make.sh"),
                &["sh", "repeat.sh", "make.sh"],
            )),
        )
    },
    Program {
        moves_on: Some(DATA),
        ..program(
            "git",
            "commits, packs in two threads, checks, clones",
            &[package("git", "git", "many short processes and pipes")],
            Start::Steps(Recipe::repeated(
                files!("repeat.sh", "git.sh"),
                &["sh", "repeat.sh", "git.sh"],
            )),
        )
    },
    Program {
        moves_on: Some(DATA),
        ..program(
            "xz-zstd",
            "pack in two threads and unpack",
            &[
                package("xz-utils", "xz", "packs in threads"),
                package("zstd", "zstd", "packs in threads"),
            ],
            Start::Steps(Recipe::repeated(
                files!("repeat.sh", "pack.sh"),
                &["sh", "repeat.sh", "pack.sh"],
            )),
        )
    },
    program(
        "ffmpeg",
        "encodes pictures and sound in four threads",
        &[package("ffmpeg", "ffmpeg", "an encoder with threads")],
        Start::Steps(Recipe::repeated(
            files!("repeat.sh", "ffmpeg.sh"),
            &["sh", "repeat.sh", "ffmpeg.sh"],
        )),
    ),
    program(
        "sox",
        "sounds through pipes of two processes",
        &[package("sox", "sox", "an encoder with pipes")],
        Start::Steps(Recipe::repeated(
            files!("repeat.sh", "sox.sh"),
            &["sh", "repeat.sh", "sox.sh"],
        )),
    ),
    program(
        "gnuplot",
        "draws surfaces and fits curves",
        &[package(
            "gnuplot-nox",
            "gnuplot",
            "numeric work with child processes",
        )],
        Start::Steps(Recipe::repeated(
            files!("repeat.sh", "gnuplot.sh"),
            &["sh", "repeat.sh", "gnuplot.sh"],
        )),
    ),
    Program {
        moves_on: Some(DATA),
        ..program(
            "tmux",
            "two windows write; one asks for its contents over the server's socket",
            &[package("tmux", "tmux", "terminals and a server")],
            Start::Steps(Recipe::new(
                files!("tmux.sh", "tmux.conf", "terminal.sh"),
                &["sh", "tmux.sh"],
            )),
        )
    },
    Program {
        moves_on: Some(DATA),
        ..program(
            "screen",
            "a window writes and asks for its contents",
            &[package("screen", "screen", "terminals and a server")],
            Start::Steps(Recipe::new(
                files!("screenrc", "terminal.sh"),
                &[
                    "sh",
                    "-c",
                    "export SCREENDIR=$PWD/sockets; exec screen -D -m -S work -c screenrc \
                 sh terminal.sh screen -S work -X hardcopy screen",
                ],
            )),
        )
    },
    Program {
        moves_on: Some(DATA),
        ..program(
            "supervisord",
            "starts a program again for one that asks over the server's socket",
            &[Package {
                services: &["supervisor.service"],
                ..package(
                    "supervisor",
                    "supervisord",
                    "a socket bound under a name that is gone",
                )
            }],
            Start::Steps(Recipe::repeated(
                files!("supervisord.conf", "supervisord.sh"),
                &["supervisord", "-c", "supervisord.conf"],
            )),
        )
    },
    program(
        "vim",
        "edits on a terminal, undoes, and talks to a job",
        &[
            package("vim", "vim", "an editor on a terminal"),
            package("bsdutils", "script", "holds the terminal"),
        ],
        Start::Steps(Recipe::new(
            files!("steps.vim"),
            &[
                "script",
                "-qec",
                "vim -Nu NONE -n -S steps.vim",
                "/dev/null",
            ],
        )),
    ),
    program(
        "emacs",
        "edits, with timers and a process",
        &[package(
            "emacs-nox",
            "emacs",
            "an editor with its own collector",
        )],
        Start::Steps(Recipe::new(
            files!("steps.el"),
            &["emacs", "--batch", "-Q", "-l", "steps.el"],
        )),
    ),
    program(
        "qemu",
        "translates two processors, on which Linux runs a shell's loop",
        &[
            package("qemu-system-x86", "qemu-system-x86_64", "an emulator"),
            package("busybox-static", "busybox", "what runs in the emulator"),
        ],
        Start::Own(emulator::start),
    ),
    Program {
        options: &[
            "--file-locks",
            "--link-remap",
            "--ghost-limit=64M",
            "--tcp-established",
        ],
        ..program(
            "chromium",
            "a page without a display: two workers, a canvas",
            &[package("chromium", "chromium", "a browser")],
            Start::Steps(Recipe {
                endless: true,
                ..Recipe::new(
                    files!("chromium.pl", "chromium.sh", "page.html"),
                    &["perl", "chromium.pl"],
                )
            }),
        )
    },
];

const NGINX_FILES: &[(&str, &str)] = &[
    ("nginx.conf", include_str!("../scripts/nginx.conf")),
    ("data", clients::NUMBERS),
];

const HAPROXY: &[Package] = &[
    Package {
        services: &["haproxy.service"],
        ..package("haproxy", "haproxy", "a proxy with threads that splices")
    },
    Package {
        services: &["memcached.service"],
        ..package("memcached", "memcached", "what is behind the proxy")
    },
];

const MARIADB: &[Package] = &[Package {
    services: &["mariadb.service"],
    ..package(
        "mariadb-server",
        "mariadbd",
        "a data base with a thread a client",
    )
}];

const MEMCACHED: &[Package] = &[Package {
    services: &["memcached.service"],
    ..package("memcached", "memcached", "threads that wait for events")
}];
