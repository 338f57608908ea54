# Fits, sorts, draws a picture into a file, and lets a forked child calculate.
step <- 0
repeat {
  step <- step + 1
  set.seed(step)
  data <- data.frame(x = sample(1000), y = sample(1000))
  data$z <- data$x * 3 + data$y
  fit <- round(coef(lm(z ~ x + y, data)), 6)
  job <- parallel::mcparallel(sum(sort(data$x * data$y)[1:100]))
  there <- parallel::mccollect(job)[[1]]
  postscript("plot.ps"); hist(data$z, main = "z"); invisible(dev.off())
  line <- paste(step, paste(fit, collapse = ","), there, file.size("plot.ps"))
  cat(line, "\n", sep = "", file = "steps", append = TRUE)
  if (file.exists("stop")) quit(status = 0, save = "no")
}
