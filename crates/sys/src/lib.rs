//! The kernel as safe functions: every unsafe system call of Stillframe stands here.
