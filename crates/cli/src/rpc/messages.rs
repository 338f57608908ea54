//! The messages of criu(8)'s RPC protocol, one a packet: fields by their number.
//!
//! Fields that the protocol demands are optional here where their absence is told apart from zero.

use prost::{Enumeration, Message};

/// Kind of a request, and of the answer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum RequestKind {
    Empty = 0,
    Dump = 1,
    Restore = 2,
    Check = 3,
    PreDump = 4,
    PageServer = 5,
    Notify = 6,
    CpuinfoDump = 7,
    CpuinfoCheck = 8,
    FeatureCheck = 9,
    Version = 10,
    WaitPid = 11,
    PageServerChild = 12,
    SinglePreDump = 13,
}

/// Request of a client (`criu_req`), or its answer to a notification.
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    #[prost(enumeration = "RequestKind", required, tag = "1")]
    pub kind: i32,
    #[prost(message, optional, tag = "2")]
    pub options: Option<RequestOptions>,
    #[prost(bool, optional, tag = "3")]
    pub notify_success: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    pub keep_open: Option<bool>,
    #[prost(message, optional, tag = "5")]
    pub features: Option<Features>,
    #[prost(uint32, optional, tag = "6")]
    pub pid: Option<u32>,
}

/// Answer to a request, or a notification (`criu_resp`).
#[derive(Clone, PartialEq, Message)]
pub struct Response {
    #[prost(enumeration = "RequestKind", required, tag = "1")]
    pub kind: i32,
    #[prost(bool, required, tag = "2")]
    pub success: bool,
    #[prost(message, optional, tag = "3")]
    pub dump: Option<DumpResponse>,
    #[prost(message, optional, tag = "4")]
    pub restore: Option<RestoreResponse>,
    #[prost(message, optional, tag = "5")]
    pub notify: Option<Notification>,
    #[prost(int32, optional, tag = "7")]
    pub errno: Option<i32>,
    #[prost(message, optional, tag = "8")]
    pub features: Option<Features>,
    #[prost(string, optional, tag = "9")]
    pub error: Option<String>,
    #[prost(message, optional, tag = "10")]
    pub version: Option<Version>,
    #[prost(int32, optional, tag = "11")]
    pub status: Option<i32>,
}

/// Result of a dump (`criu_dump_resp`).
#[derive(Clone, PartialEq, Message)]
pub struct DumpResponse {
    /// True in a client that was dumped itself and came back.
    #[prost(bool, optional, tag = "1")]
    pub restored: Option<bool>,
}

/// Result of a restore (`criu_restore_resp`).
#[derive(Clone, PartialEq, Message)]
pub struct RestoreResponse {
    #[prost(int32, required, tag = "1")]
    pub pid: i32,
}

/// Stage of a dump or a restore (`criu_notify`).
#[derive(Clone, PartialEq, Message)]
pub struct Notification {
    #[prost(string, optional, tag = "1")]
    pub script: Option<String>,
    #[prost(int32, optional, tag = "2")]
    pub pid: Option<i32>,
}

/// Features that a client asks about (`criu_features`).
#[derive(Clone, PartialEq, Message)]
pub struct Features {
    #[prost(bool, optional, tag = "1")]
    pub mem_track: Option<bool>,
    #[prost(bool, optional, tag = "2")]
    pub lazy_pages: Option<bool>,
    #[prost(bool, optional, tag = "3")]
    pub pidfd_store: Option<bool>,
}

/// Version of criu(8) whose protocol this is (`criu_version`).
#[derive(Clone, PartialEq, Message)]
pub struct Version {
    #[prost(int32, required, tag = "1")]
    pub major: i32,
    #[prost(int32, required, tag = "2")]
    pub minor: i32,
}

/// Options of a request (`criu_opts`).
#[derive(Clone, PartialEq, Message)]
pub struct RequestOptions {
    #[prost(int32, optional, tag = "1")]
    pub images_dir_fd: Option<i32>,
    #[prost(int32, optional, tag = "2")]
    pub pid: Option<i32>,
    #[prost(bool, optional, tag = "3")]
    pub leave_running: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    pub ext_unix_sk: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    pub tcp_established: Option<bool>,
    #[prost(bool, optional, tag = "6")]
    pub evasive_devices: Option<bool>,
    #[prost(bool, optional, tag = "7")]
    pub shell_job: Option<bool>,
    #[prost(bool, optional, tag = "8")]
    pub file_locks: Option<bool>,
    #[prost(int32, optional, tag = "9")]
    pub log_level: Option<i32>,
    #[prost(string, optional, tag = "10")]
    pub log_file: Option<String>,
    #[prost(message, optional, tag = "11")]
    pub page_server: Option<PageServer>,
    #[prost(bool, optional, tag = "12")]
    pub notify_scripts: Option<bool>,
    #[prost(string, optional, tag = "13")]
    pub root: Option<String>,
    #[prost(string, optional, tag = "14")]
    pub parent_img: Option<String>,
    #[prost(bool, optional, tag = "15")]
    pub track_mem: Option<bool>,
    #[prost(bool, optional, tag = "16")]
    pub auto_dedup: Option<bool>,
    #[prost(int32, optional, tag = "17")]
    pub work_dir_fd: Option<i32>,
    #[prost(bool, optional, tag = "18")]
    pub link_remap: Option<bool>,
    #[prost(message, repeated, tag = "19")]
    pub veths: Vec<VethPair>,
    #[prost(uint32, optional, tag = "20")]
    pub cpu_cap: Option<u32>,
    #[prost(bool, optional, tag = "21")]
    pub force_irmap: Option<bool>,
    #[prost(string, repeated, tag = "22")]
    pub exec_cmd: Vec<String>,
    #[prost(message, repeated, tag = "23")]
    pub ext_mnt: Vec<MountMap>,
    #[prost(bool, optional, tag = "24")]
    pub manage_cgroups: Option<bool>,
    #[prost(message, repeated, tag = "25")]
    pub cg_root: Vec<CgroupRoot>,
    #[prost(bool, optional, tag = "26")]
    pub rst_sibling: Option<bool>,
    #[prost(message, repeated, tag = "27")]
    pub inherit_fd: Vec<InheritedFd>,
    #[prost(bool, optional, tag = "28")]
    pub auto_ext_mnt: Option<bool>,
    #[prost(bool, optional, tag = "29")]
    pub ext_sharing: Option<bool>,
    #[prost(bool, optional, tag = "30")]
    pub ext_masters: Option<bool>,
    #[prost(string, repeated, tag = "31")]
    pub skip_mnt: Vec<String>,
    #[prost(string, repeated, tag = "32")]
    pub enable_fs: Vec<String>,
    #[prost(message, repeated, tag = "33")]
    pub unix_sk_ino: Vec<UnixSocket>,
    #[prost(int32, optional, tag = "34")]
    pub manage_cgroups_mode: Option<i32>,
    #[prost(uint32, optional, tag = "35")]
    pub ghost_limit: Option<u32>,
    #[prost(string, repeated, tag = "36")]
    pub irmap_scan_paths: Vec<String>,
    #[prost(string, repeated, tag = "37")]
    pub external: Vec<String>,
    #[prost(uint32, optional, tag = "38")]
    pub empty_ns: Option<u32>,
    #[prost(message, repeated, tag = "39")]
    pub join_ns: Vec<JoinedNamespace>,
    #[prost(string, optional, tag = "41")]
    pub cgroup_props: Option<String>,
    #[prost(string, optional, tag = "42")]
    pub cgroup_props_file: Option<String>,
    #[prost(string, repeated, tag = "43")]
    pub cgroup_dump_controller: Vec<String>,
    #[prost(string, optional, tag = "44")]
    pub freeze_cgroup: Option<String>,
    #[prost(uint32, optional, tag = "45")]
    pub timeout: Option<u32>,
    #[prost(bool, optional, tag = "46")]
    pub tcp_skip_in_flight: Option<bool>,
    #[prost(bool, optional, tag = "47")]
    pub weak_sysctls: Option<bool>,
    #[prost(bool, optional, tag = "48")]
    pub lazy_pages: Option<bool>,
    #[prost(int32, optional, tag = "49")]
    pub status_fd: Option<i32>,
    #[prost(bool, optional, tag = "50")]
    pub orphan_pts_master: Option<bool>,
    #[prost(string, optional, tag = "51")]
    pub config_file: Option<String>,
    #[prost(bool, optional, tag = "52")]
    pub tcp_close: Option<bool>,
    #[prost(string, optional, tag = "53")]
    pub lsm_profile: Option<String>,
    #[prost(string, optional, tag = "54")]
    pub tls_cacert: Option<String>,
    #[prost(string, optional, tag = "55")]
    pub tls_cacrl: Option<String>,
    #[prost(string, optional, tag = "56")]
    pub tls_cert: Option<String>,
    #[prost(string, optional, tag = "57")]
    pub tls_key: Option<String>,
    #[prost(bool, optional, tag = "58")]
    pub tls: Option<bool>,
    #[prost(bool, optional, tag = "59")]
    pub tls_no_cn_verify: Option<bool>,
    #[prost(string, optional, tag = "60")]
    pub cgroup_yard: Option<String>,
    #[prost(int32, optional, tag = "61")]
    pub pre_dump_mode: Option<i32>,
    #[prost(int32, optional, tag = "62")]
    pub pidfd_store_sk: Option<i32>,
    #[prost(string, optional, tag = "63")]
    pub lsm_mount_context: Option<String>,
    #[prost(int32, optional, tag = "64")]
    pub network_lock: Option<i32>,
    #[prost(bool, optional, tag = "65")]
    pub mntns_compat_mode: Option<bool>,
    #[prost(bool, optional, tag = "66")]
    pub skip_file_rwx_check: Option<bool>,
    #[prost(bool, optional, tag = "67")]
    pub unprivileged: Option<bool>,
    #[prost(string, optional, tag = "68")]
    pub images_dir: Option<String>,
    #[prost(bool, optional, tag = "69")]
    pub leave_stopped: Option<bool>,
    #[prost(bool, optional, tag = "70")]
    pub display_stats: Option<bool>,
    #[prost(bool, optional, tag = "71")]
    pub log_to_stderr: Option<bool>,
}

/// Page server of a dump (`criu_page_server_info`).
#[derive(Clone, PartialEq, Message)]
pub struct PageServer {
    #[prost(string, optional, tag = "1")]
    pub address: Option<String>,
    #[prost(int32, optional, tag = "2")]
    pub port: Option<i32>,
    #[prost(int32, optional, tag = "3")]
    pub pid: Option<i32>,
    #[prost(int32, optional, tag = "4")]
    pub fd: Option<i32>,
}

/// Pair of virtual network interfaces (`criu_veth_pair`).
#[derive(Clone, PartialEq, Message)]
pub struct VethPair {
    #[prost(string, required, tag = "1")]
    pub inside: String,
    #[prost(string, required, tag = "2")]
    pub outside: String,
}

/// Mount from outside of the tree (`ext_mount_map`).
#[derive(Clone, PartialEq, Message)]
pub struct MountMap {
    #[prost(string, required, tag = "1")]
    pub key: String,
    #[prost(string, required, tag = "2")]
    pub value: String,
}

/// Topmost control group of the tree (`cgroup_root`).
#[derive(Clone, PartialEq, Message)]
pub struct CgroupRoot {
    #[prost(string, optional, tag = "1")]
    pub controller: Option<String>,
    #[prost(string, required, tag = "2")]
    pub path: String,
}

/// Descriptor that takes the place of a saved one (`inherit_fd`).
#[derive(Clone, PartialEq, Message)]
pub struct InheritedFd {
    #[prost(string, required, tag = "1")]
    pub key: String,
    #[prost(int32, required, tag = "2")]
    pub fd: i32,
}

/// Unix socket that is connected to somebody outside of the tree (`unix_sk`).
#[derive(Clone, PartialEq, Message)]
pub struct UnixSocket {
    #[prost(uint32, required, tag = "1")]
    pub inode: u32,
}

/// Namespace that the tree is restored into (`join_namespace`).
#[derive(Clone, PartialEq, Message)]
pub struct JoinedNamespace {
    #[prost(string, required, tag = "1")]
    pub kind: String,
    #[prost(string, required, tag = "2")]
    pub file: String,
    #[prost(string, optional, tag = "3")]
    pub extra: Option<String>,
}
